"""An order for many microbatches, from one for few: in the middle it goes on at a steady rate."""

from __future__ import annotations

from .list_scheduling import Listed
from .problem import Problem

STEP = 12
"""How many microbatches are put in to see how well an order can be stretched."""
CUTS = (0.3, 0.45, 0.6, 0.75)
"""Where they may be put in, as shares of the time."""
PATIENCES = (0.2, 0.1, 0.5)
"""The patience with which list scheduling follows a stretched order."""


def fewer_microbatches(problem: Problem) -> int:
    """For how many microbatches to search: enough to fill and to empty the pipeline."""
    m = problem.microbatches
    least = 3 * problem.ranks + STEP
    return least if m > least + 2 * STEP else m


def stretched(problem: Problem, listed: Listed, cut: float, more: int) -> list[list[float]]:
    """The urgency by which list scheduling stretches an order.

    What has started at the cut keeps its time. Then each lane takes so many microbatches more, one
    in the time that one takes on the busiest rank. What is after the cut follows, as much later.
    The earlier, the more urgent; memory, and what tasks wait for, list scheduling sees to.

    Args:
        problem: what the order is for.
        listed: the order, with the times at which its tasks start.
        cut: when, as a share of the time in which all ranks work.
        more: how many microbatches to put in.

    Returns:
        By lane and microbatch, for as many microbatches more.
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
