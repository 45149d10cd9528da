"""Keep backwards whole on ranks whose memory is short.

What B leaves to W waits for W: inputs and cotangents of all layers of a stage, which nothing
computes again. A whole backward frees those of a layer before it comes to the next one. So where
nothing else helps, a rank gives up the time that it gains by putting W off.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..schedules import Schedule, is_search


def may_be_whole(schedule: Schedule | None) -> bool:
    """True if a schedule splits backwards, and its order is not searched for."""
    return schedule is not None and schedule.splits and not is_search(schedule)


def with_whole_backwards(schedule: Schedule | None, ranks: Collection[int]) -> Schedule | None:
    """The schedule with backwards that stay whole on some ranks, if it splits any."""
    return None if schedule is None else replace(schedule, whole=schedule.whole | set(ranks))
