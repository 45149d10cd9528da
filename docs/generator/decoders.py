"""What comes of training and serving decoders of transformers, from the record of that."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from .tables import table

RECORD = Path(__file__).resolve().parents[2] / "tests" / "models" / "decoders.json"
RUNS = ("two stages", "tp", "fsdp", "saved", "served")


def summary() -> str:
    """How many types there are, and how many have come to what, by shape."""
    record = _record()
    rows = []
    decoders = record["decoders"].values()
    plans = Counter(row["plan"][0] for row in decoders if "plan" in row)
    for column in RUNS:
        counts = Counter(row[column][0] for row in decoders if column in row)
        outcomes = (counts["equal"], counts["refused"], counts["not yet"])
        fails = counts["plain fails"]
        others = (fails, record["types"] - sum(outcomes) - fails)
        rows.append((column, *map(str, (sum(outcomes), *outcomes, *others))))
    heads = ("run", "plain runs", "equal", "refused", "not yet", "plain fails", "not tried")
    versions = f"transformers {record['transformers']}, torch {record['torch']}"
    return (
        f"With {versions}: {record['types']} types, of which {plans['brought']} bring a plan and "
        f"{plans['derived']} have one that is derived.\n\n{table(heads, rows)}"
    )


def reference() -> str:
    """A row for each type of which something is recorded."""
    rows = [
        (f"`{kind}`", *(row.get(column, [""])[0] for column in ("plan", *RUNS)))
        for kind, row in _record()["decoders"].items()
    ]
    return table(("type", "plan", *RUNS), rows)


def reasons() -> str:
    """The reasons of what is not equal."""
    rows = [
        (f"`{kind}`", column, f"{outcome[0]}: {_code(outcome[1])}")
        for kind, row in _record()["decoders"].items()
        for column, outcome in row.items()
        if len(outcome) > 1
    ]
    return table(("type", "run", "reason"), rows)


def _code(text: str) -> str:
    """Text of an error as code of a cell."""
    return "`" + text.replace("`", "'").replace("|", "\\|") + "`"


def _record() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record
