"""Rows of arms: figures that follow from what was measured, the table, and the check of losses."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from .shapes import SHAPES, peak

FIRST_LOSS, LAST_LOSS = 0.01, 0.03
"""By what share of itself a loss may differ from that of the first arm.

Arms round to bfloat16 at other places and add up gradients in other orders, and over the steps what
differs grows.
"""

Row = dict[str, Any]


def derived(result: Row, shape: str, warm: int, ranks: int) -> Row:
    """Tokens a second by the median of steady steps, and the share of the cards' peak."""
    milliseconds = statistics.median(result["step_ms"][warm:])
    tokens = SHAPES[shape].tokens / milliseconds * 1e3
    limit = peak(result["device"])
    used = None if limit is None else tokens * SHAPES[shape].operations / ranks / limit
    return {
        "tokens_per_second": round(tokens, 1),
        "median_step_ms": round(milliseconds, 3),
        "mfu": None if used is None else round(used, 4),
    }


def table(rows: Sequence[Row]) -> str:
    """A line for each arm of each shape; medians, where it had several turns."""
    lines = [
        f"{'arm':38} {'tokens/s':>9} {'MFU':>6} {'peak GiB':>11} {'NCCL ms':>8} {'exposed':>8} "
        f"{'share':>6} {'first s':>8}  losses"
    ]
    keys = dict.fromkeys((row["shape"], row["arm"]) for row in rows)
    for shape, arm in keys:
        turns = [row for row in rows if (row["shape"], row["arm"]) == (shape, arm)]
        ended = [row for row in turns if row["status"] == "ok"]
        name = f"{shape} {arm}"
        lines += [f"{name:38} {_line(ended)}"] if ended else []
        lines += [f"{name:38} {row['status']}: {row['error']}" for row in turns if "error" in row]
    return "\n".join(lines)


def _line(turns: Sequence[Row]) -> str:
    seen = [
        [rank["communication"][name] for turn in turns for rank in turn["ranks"]]
        for name in ("communication_ms", "exposed_ms", "exposed_share")
        if all(rank["communication"] for turn in turns for rank in turn["ranks"])
    ]
    of_nccl = [statistics.median(each) for each in seen] or [None] * 3
    peaks = [turns[-1]["peak_gib"][rank] for rank in range(len(turns[-1]["peak_gib"]))]
    figures = [
        _number(statistics.median(turn["tokens_per_second"] for turn in turns), 9, "0f"),
        _number(_median(turn["mfu"] for turn in turns), 6, "1%"),
        f"{' '.join(_number(each, 5, '1f') for each in peaks):>11}",
        _number(of_nccl[0], 8, "1f"),
        _number(of_nccl[1], 8, "1f"),
        _number(of_nccl[2], 6, "0%"),
        _number(statistics.median(turn["until_first_step_s"] for turn in turns), 8, "1f"),
    ]
    return f"{' '.join(figures)}  {turns[0]['losses'][0]:.4f} {turns[0]['losses'][-1]:.4f}"


def _median(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _number(value: float | None, width: int, kind: str) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{kind}}"


def disagreements(rows: Sequence[Row]) -> list[str]:
    """The arms whose first or last loss is not that of the first arm of the shape, in words."""
    lines = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        ended = [row for row in rows if row["shape"] == shape and row["status"] == "ok"]
        for row in ended[1:]:
            for which, place, limit in (("first", 0, FIRST_LOSS), ("last", -1, LAST_LOSS)):
                right, own = ended[0]["losses"][place], row["losses"][place]
                if not abs(own - right) <= limit * right:  # also where it is no number
                    of_first = f"{right:.4f} of {ended[0]['arm']}"
                    lines.append(f"{shape} {row['arm']}: {which} loss {own:.4f}, not {of_first}")
    return lines
