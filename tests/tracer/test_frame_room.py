"""Calls from a function with room for its frames ask the system for no memory, however deep."""

from __future__ import annotations

import resource

from cg.tracer.step.frame_room import with_frame_room

CALLS = 200
DEPTH = 300
"""The frames of so many calls fill a chunk of 16 KiB, and more."""


def called() -> None:
    pass


def most_faults(depth: int) -> int:
    """Page faults of a loop of calls, at the depth where these are most."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        called()
    mine = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return max(mine, most_faults(depth - 1)) if depth else mine


def test_no_depth_is_at_the_end_of_a_chunk() -> None:
    assert most_faults(DEPTH) >= CALLS
    assert with_frame_room(most_faults)(DEPTH) < CALLS / 2


def test_a_decorated_function_is_called_as_it_is() -> None:
    @with_frame_room
    def named(one: int, *, other: int) -> tuple[int, int]:
        """Says what it is."""
        return one, other

    assert named(1, other=2) == (1, 2)
    assert (named.__name__, named.__doc__) == ("named", "Says what it is.")
