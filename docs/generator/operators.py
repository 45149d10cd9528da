"""The operators of torch that have been tried in traced methods, from the record of that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .tables import table

TESTS = Path(__file__).resolve().parents[2] / "tests" / "tracer"
ONE_RANK, MESH = TESTS / "operators.json", TESTS / "cut_operators.json"


def summary() -> str:
    """How many there are, and with which version of torch."""
    record = _record(ONE_RANK)
    return (
        f"With torch {record['torch']}: {len(record['operators'])} operators and variants. "
        f"On one rank {_counts(record)}. On a mesh {_counts(_record(MESH))}.\n"
    )


def _counts(record: dict[str, Any]) -> str:
    known = record["operators"].values()
    tried, equal = (sum(each[key] for each in known) for key in ("tried", "equal"))
    refused = sum(sum(each["refused"].values()) for each in known)
    return (
        f"{tried:,} calls were tried, of which {equal:,} give what eager PyTorch gives and "
        f"{refused:,} are refused"
    )


def reference() -> str:
    """A row for each operator."""
    cut = _record(MESH)["operators"]
    rows = [
        (f"`{name}`", _share(each), _share(cut[name]), _refused(each["refused"]))
        for name, each in _record(ONE_RANK)["operators"].items()
        if each["tried"]
    ]
    return table(("operator", "equal on one rank", "on a mesh", "refused on one rank"), rows)


def _share(outcome: dict[str, Any]) -> str:
    return f"{outcome['equal']} of {outcome['tried']}" if outcome["tried"] else ""


def _refused(reasons: dict[str, int]) -> str:
    return "; ".join(f"{count}: {reason}" for reason, count in reasons.items())


def _record(file: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return record
