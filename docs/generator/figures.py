"""Tables of figures that benchmarks have recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .tables import table

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def schedules() -> str:
    """Bubbles, activations and makespans of every schedule, foreseen and measured."""
    recorded = json.loads((RESULTS / "schedules.json").read_text(encoding="utf-8"))
    rows = recorded["figures"]
    head = (
        "schedule",
        "p",
        "m",
        "F, B, W",
        "bubble: formula",
        "paper",
        "peak: formula",
        "paper",
        "makespan: predicted",
        "measured",
        "error",
    )
    errors = [abs(row["error"]) for row in rows]
    within = sum(error <= 0.03 for error in errors)
    machine = recorded["machine"]
    return (
        f"{table(head, map(_schedule, rows))}\n\n"
        f"{within} of {len(rows)} predictions are within 3 %, and the worst is off by "
        f"{max(errors):.1%}. Recorded by `{recorded['command']}` on {machine['cores']} cores "
        f"({machine['cpu']})."
    )


def _schedule(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"`{row['schedule']}`",
        str(row["ranks"]),
        str(row["microbatches"]),
        ", ".join(_number(row[name]) for name in ("tf", "tb", "tw")),
        _share(row["formula_bubble"]),
        _share(row["paper_bubble"]),
        _number(row["formula_activations"]),
        _number(row["paper_activations"]),
        f"{row['predicted']:.1f}",
        f"{row['measured']:.1f}",
        f"{row['error']:+.1%}",
    )


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
