"""Tables and a picture of the search of `auto`, from what `benchmarks/auto_search.py` recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from .bars import COLOURS, WIDTH, opening, text_at
from .figures import RESULTS
from .tables import table

Row = dict[str, Any]

_LAYOUTS = {
    "line": ("blue", "auto, one stage a rank"),
    "loop": ("green", "auto, two in loops"),
    "vee": ("orange", "auto, two in a V"),
}
_LEFT, _TOP, _RIGHT, _HEIGHT, _FOOT = 56, 84, 24, 300, 46
_MOST = 0.4
"""The largest bubble that the picture has room for."""
_SHIFTS = {"zb-h1": -8, "dualpipe-v": 9, "interleaved": -6, "zb-v": 24}
"""How much lower some names stand, so that none hides another."""


def picture() -> str:
    """Bubble against memory: a point for each schedule, a line for `auto` on each layout."""
    rows: list[Row] = _recorded()["frontier"]
    most = max(row["activations"] for row in rows if row["schedule"] == "auto") + 1
    title = "8 ranks, 32 microbatches: bubble against memory"
    note = "F 1, B 1.2, W 0.8, transfers 0.05; lines: what auto finds; dots: other schedules"
    lines = opening(title, _TOP + _HEIGHT + _FOOT)
    lines += [text_at(16, 26, title, "title"), text_at(16, 46, note, "faint")]
    for at, (colour, meaning) in enumerate(_LAYOUTS.values()):
        left = 16 + 200 * at
        lines += [_dot(left + 5, 64, colour), text_at(left + 16, 68, meaning, "ink")]
    lines += _axes(most)
    for layout, (colour, _) in _LAYOUTS.items():
        found = [r for r in rows if r["layout"] == layout and r["schedule"] == "auto"]
        lines.append(_path(_steps(found, most), colour, most))
    for row in rows:
        if row["schedule"] != "auto" and row["activations"] <= most and row["bubble"] <= _MOST:
            x, y = _place(row["activations"], row["bubble"], most)
            lines.append(_dot(x, y, _LAYOUTS[row["layout"]][0]))
            y += _SHIFTS.get(row["schedule"], 0) - 5
            lines.append(text_at(x + 7, y, row["schedule"], "ink"))
    return "\n".join([*lines, "</svg>\n"])


def random_settings() -> str:
    """How far `auto` is above its bound on random settings, by memory."""
    recorded = _recorded()
    rows: list[Row] = recorded["random"]
    groups = (
        ("twice that of 1F1B", [r for r in rows if _share(r) == 2]),
        ("between", [r for r in rows if 1 < _share(r) < 2]),
        ("that of 1F1B", [r for r in rows if _share(r) == 1]),
    )
    head = ("memory", "settings", "at most 1 % above the bound", "median", "worst", "before: worst")
    lines = [_memory(name, found) for name, found in groups if found]
    optima = recorded["optima"]
    met = sum(row["makespan"] <= row["optimum"] + 1e-6 for row in optima)
    return (
        f"{table(head, lines)}\n\nOf {len(optima)} small pipelines, whose optima an exact solver "
        f"has proven, {met} are met. {_source(recorded)}"
    )


def times() -> str:
    """Seconds of processor time of a search, by size."""
    rows: list[Row] = _recorded()["times"]
    head = ("ranks", "microbatches", "layout", "search, s", "above the bound", "from")
    return table(
        head,
        [
            (
                str(row["ranks"]),
                str(row["microbatches"]),
                row["layout"],
                f"{row['search_s']:.2f}",
                f"{row['gap']:.2%}",
                row["source"],
            )
            for row in rows
        ],
    )


def _memory(name: str, rows: Sequence[Row]) -> tuple[str, ...]:
    gaps = sorted(row["makespan"] / row["bound"] - 1 for row in rows)
    before = [row["before"] / row["bound"] - 1 for row in rows if row["before"]]
    return (
        name,
        str(len(rows)),
        f"{sum(gap <= 0.01 for gap in gaps) / len(gaps):.0%}",
        f"{gaps[len(gaps) // 2]:.2%}",
        f"{gaps[-1]:.2%}",
        f"{max(before):.2%}" if before else "",
    )


def _share(row: Row) -> float:
    return float(row["setting"]["memory"] / row["setting"]["ranks"])


def _recorded() -> Any:
    return json.loads((RESULTS / "auto_search.json").read_text(encoding="utf-8"))


def _source(recorded: Any) -> str:
    machine = recorded["provenance"]["machine"]
    return (
        f"Recorded by `python benchmarks/auto_search.py` on {machine['cores']} cores "
        f"({machine['cpu']})."
    )


def _place(activations: float, bubble: float, most: float) -> tuple[float, float]:
    width = WIDTH - _LEFT - _RIGHT
    return _LEFT + activations / most * width, _TOP + (1 - bubble / _MOST) * _HEIGHT


def _steps(rows: Sequence[Row], most: float) -> Iterator[tuple[float, float]]:
    """The least bubble in so many activations, as corners of a line that only falls."""
    least = 1.0
    for row in sorted(rows, key=lambda row: (row["activations"], row["bubble"])):
        if row["bubble"] < least and row["bubble"] <= _MOST:
            if least <= _MOST:
                yield row["activations"], least
            least = row["bubble"]
            yield row["activations"], least
    yield most, least


def _path(points: Iterator[tuple[float, float]], colour: str, most: float) -> str:
    corners = " L ".join(f"{x:.1f} {y:.1f}" for x, y in (_place(*point, most) for point in points))
    return (
        f'<path d="M {corners}" fill="none" stroke="{COLOURS[colour][0]}" stroke-width="2" '
        'style="fill: none"/>'
    )


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'


def _axes(most: float) -> Iterator[str]:
    for percent in range(0, int(100 * _MOST) + 1, 10):
        left, y = _place(0, percent / 100, most)
        yield (
            f'<line x1="{left}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="#898781" stroke-opacity="0.35"/>'
        )
        yield text_at(left - 8, y + 4, f"{percent} %", "faint end")
    bottom = _TOP + _HEIGHT
    for count in range(0, int(most) + 1, 2):
        x, _ = _place(count, 0, most)
        yield text_at(x - 4, bottom + 18, str(count), "faint")
    yield text_at(
        _LEFT, bottom + 38, "activations of so many microbatches on the fullest rank", "faint"
    )
