"""Draw a timeline as text: a line for each rank, with time from left to right."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.pipeline.timing import Timeline

_WIDEST = 1_000_000
_COARSEST = 8
"""The most by which the longest task may exceed the task whose name must fit."""


def grid(timeline: Timeline, ranks: Sequence[int] | None = None) -> str:
    """Draw a timeline.

    The width of a task is its time. A task begins with its name (`2F0`: stage 2, forward,
    microbatch 0), which is cut if there is no room; dots are idle time.

    Args:
        timeline: the timeline.
        ranks: the ranks to draw, in order; None: all ranks, ascending.

    Raises:
        ValueError: a line would be too wide, as one task or gap is far longer than the others.
    """
    ranks = sorted(timeline.rows) if ranks is None else ranks
    per_ms = _scale(timeline)
    width = timeline.end * per_ms
    if not width <= _WIDEST:
        raise ValueError(
            f"the grid would be {width:.3g} letters wide, and {_WIDEST:,} are the most; draw the "
            "timeline into a file instead (--svg, --html), or choose costs that are more alike"
        )
    label = max(len(str(rank)) for rank in ranks)
    return "".join(f"{rank:>{label}} | {_line(timeline, rank, per_ms)}\n" for rank in ranks)


def _scale(timeline: Timeline) -> float:
    """The characters for each millisecond, so that the name of the shortest task fits."""
    times = [time for time in timeline.durations if time]
    if not times:
        return 1.0
    longest = len(str(len(timeline.stage_ranks) - 1)) + len(str(timeline.microbatches - 1)) + 1
    return (longest + 1) / max(min(times), max(times) / _COARSEST)


def _line(timeline: Timeline, rank: int, per_ms: float) -> str:
    cells: list[str] = []
    at = 0
    for task, start, end in timeline.tasks(rank):
        first, last = round(start * per_ms), round(end * per_ms)
        cells.append("." * (first - at))
        width = last - first
        cells.append(str(task)[: width - 1].ljust(width) if width > 1 else " " * width)
        at = last
    return "".join(cells)
