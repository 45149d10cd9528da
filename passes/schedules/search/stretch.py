"""Stretch an order for few microbatches to many: in the middle it goes on at a steady rate."""

from __future__ import annotations

from .list_scheduling import Listed
from .problem import OrderProblem

STEP = 12
"""The number of microbatches that are inserted to see how well an order can be stretched."""
CUTS = (0.3, 0.45, 0.6, 0.75)
"""The times at which they may be inserted, as shares of the time in which all ranks work."""
PATIENCES = (0.2, 0.1, 0.5)
"""The patience with which list scheduling follows a stretched order."""


def fewer_microbatches(problem: OrderProblem) -> int:
    """The number of microbatches to search with: enough to fill and to empty the pipeline."""
    m = problem.microbatches
    least = 3 * problem.ranks + STEP
    return least if m > least + 2 * STEP else m


def stretched(problem: OrderProblem, listed: Listed, cut: float, more: int) -> list[list[float]]:
    """The urgency with which list scheduling stretches an order.

    Tasks that start before the cut keep their times. Then each lane takes `more` further
    microbatches, at the rate of the busiest rank. Tasks behind the cut follow, later by the same
    time. Earlier tasks are more urgent; list scheduling takes care of memory and dependencies.

    Args:
        problem: the problem of the order.
        listed: the order, with the starts of its tasks.
        cut: the time of the cut, as a share of the time in which all ranks work.
        more: the number of microbatches to insert.

    Returns:
        The urgency by lane and microbatch, for `more` more microbatches than in the problem.
    """
    n, m = problem.parts, problem.microbatches
    unit = max(problem.work(rank) for rank in range(problem.ranks))
    time = cut * min(starts[-1] for starts in listed.starts)
    times: list[list[float]] = [[] for _ in range(3 * n)]
    for lanes, starts in zip(listed.lanes, listed.starts, strict=True):
        for lane, start in zip(lanes, starts, strict=True):
            times[lane].append(start)
    urgency = []
    for lane_starts in times:
        if not lane_starts:
            urgency.append([0.0] * (m + more))
            continue
        begun = sum(start < time for start in lane_starts)
        upcoming = lane_starts[begun] if begun < m else lane_starts[-1] + unit
        early = [-start for start in lane_starts[:begun]]
        middle = [-(upcoming + unit * i) for i in range(more)]
        urgency.append(early + middle + [-(start + unit * more) for start in lane_starts[begun:]])
    return urgency
