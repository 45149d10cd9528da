"""An order for many microbatches, from one for few: the part in the middle is repeated."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from .list_scheduling import Listed
from .problem import Problem

PERIODS = (1, 2, 3, 4, 6, 12)
"""How many microbatches the part that is repeated may have."""
STEP = 12
"""What all of these divide."""
_CUTS = 32
"""How many places are tried for the beginning of that part."""


def fewer_microbatches(problem: Problem) -> int:
    """For how many microbatches to search: enough to fill and empty the pipeline."""
    m = problem.microbatches
    least = 3 * problem.ranks + STEP
    return least + (m - least) % STEP if m > least + 2 * STEP else m


def repetitions(problem: Problem, listed: Listed, microbatches: int) -> Iterator[list[list[int]]]:
    """Orders for so many microbatches that repeat a part of a list schedule.

    The part is what all ranks run from one time until each of their lanes is some microbatches
    further. What is held, and which tasks wait for which, is then the same at its end as at its
    beginning; so it can be repeated, and the memory that it takes stays what it was.

    Args:
        problem: what the list schedule is of.
        listed: the list schedule.
        microbatches: more than it has, by a multiple of `STEP`.
    """
    more = microbatches - problem.microbatches
    ends = [starts[-1] for starts in listed.starts]
    latest = min(ends)
    widths = [3 if problem.split else 2] * problem.ranks
    widths = [width * len(parts) for width, parts in zip(widths, problem.hosted, strict=True)]
    for period in PERIODS:
        for cut in range(_CUTS):
            time = latest * (0.25 + 0.5 * cut / _CUTS)
            firsts = [bisect_left(starts, time) for starts in listed.starts]
            lanes = zip(listed.lanes, firsts, widths, strict=True)
            parts = [word[first : first + width * period] for word, first, width in lanes]
            if not all(map(_is_even, parts, [period] * len(parts), widths)):
                continue
            yield [
                word[:first] + part * (more // period) + word[first:]
                for word, first, part in zip(listed.lanes, firsts, parts, strict=True)
            ]
            break


def _is_even(part: list[int], period: int, width: int) -> bool:
    """True if each lane of a rank is there as often as the period says."""
    lanes = set(part)
    return len(lanes) * period == len(part) == width * period and all(
        part.count(lane) == period for lane in lanes
    )
