"""The operators of torch that have been tried in traced methods, from the record of that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .tables import table

RECORD = Path(__file__).resolve().parents[2] / "tests" / "tracer" / "operators.json"


def summary() -> str:
    """How many there are, and with which version of torch."""
    record = _record()
    known = record["operators"].values()
    tried, equal = (sum(each[key] for each in known) for key in ("tried", "equal"))
    refused = sum(sum(each["refused"].values()) for each in known)
    return (
        f"With torch {record['torch']}: {len(known)} operators and variants, {tried} calls, of "
        f"which {equal} give what eager PyTorch gives and {refused} are refused.\n"
    )


def reference() -> str:
    """A row for each operator."""
    rows = [
        (f"`{name}`", str(each["tried"]), str(each["equal"]), _refused(each["refused"]))
        for name, each in _record()["operators"].items()
        if each["tried"]
    ]
    return table(("operator", "calls tried", "equal", "refused"), rows)


def _refused(reasons: dict[str, int]) -> str:
    return "; ".join(f"{count}: {reason}" for reason, count in reasons.items())


def _record() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record
