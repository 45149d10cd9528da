"""Cut a row of costs into runs, so that the dearest run costs as little as possible."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache


def balance(
    costs: Sequence[float],
    parts: int,
    before: float,
    after: float,
    may_cut: Callable[[int], bool],
) -> list[int] | None:
    """Cut costs into contiguous runs of one or more.

    Args:
        costs: of each item.
        parts: the number of runs.
        before, after: the additional costs of the first run and of the last one.
        may_cut: whether a run may begin at an index.

    Returns:
        The length of each run; None if there are no such runs. Of equally good ones, those with the
        cheapest last run, then the cheapest one before it.
    """
    sums = [0.0, *itertools.accumulate(costs)]
    count = len(costs)

    @cache
    def best(stop: int, runs: int) -> tuple[float, int] | None:
        """The cost of the dearest of `runs` runs up to `stop`, and where the last one begins."""
        extra = after if stop == count else 0.0
        if runs == 1:
            return sums[stop] + before + extra, 0
        cheapest: tuple[float, int] | None = None
        for start in range(stop - 1, runs - 2, -1):
            rest = best(start, runs - 1) if may_cut(start) else None
            if rest is None:
                continue
            dearest = max(rest[0], sums[stop] - sums[start] + extra)
            if cheapest is None or dearest < cheapest[0]:
                cheapest = dearest, start
        return cheapest

    if not 1 <= parts <= count:
        return None
    bounds = [count]
    for runs in range(parts, 0, -1):
        chosen = best(bounds[-1], runs)
        if chosen is None:
            return None
        bounds.append(chosen[1])
    return [stop - start for stop, start in itertools.pairwise(bounds)][::-1]
