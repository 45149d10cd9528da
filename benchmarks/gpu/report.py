"""The figures of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from provenance import provenance

import cg

Row = dict[str, Any]


class Report:
    """Collects figures; every rank has all of them, rank 0 prints.

    Attributes:
        rows: one for each figure.
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._origin: Row = {}

    def note(self, section: str, what: str, value: float, unit: str, **more: Any) -> None:
        """Record a figure; the same call on all ranks."""
        row = {"section": section, "what": what, "value": round(value, 4), "unit": unit, **more}
        self.rows.append(row)
        self.say(f"  {section:12} {what:58} {row['value']:>12} {unit}")

    def say(self, *what: object) -> None:
        """Print on rank 0."""
        if cg.rank() == 0:
            print(*what, flush=True)

    def write(self, path: Path) -> None:
        """All figures and where they come from, as JSON; on rank 0."""
        if cg.rank() == 0:
            self._origin = self._origin or {**provenance(), "ranks": cg.world_size()}
            path.write_text(json.dumps({**self._origin, "rows": self.rows}, indent=1) + "\n")

    def table(self) -> None:
        """All figures, as text."""
        self.say()
        for row in self.rows:
            ratio = f"{row['ratio']:.2f}x by hand" if "ratio" in row else ""
            value = f"{row['value']:>12} {row['unit']:3}"
            self.say(f"{row['section']:12} {row['what']:58} {value} {ratio}")
