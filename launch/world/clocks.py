"""Bound the offsets between the clocks of ranks, by the order of events that ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

from ...backends.base import World

ROUNDS = 24
"""Rounds of a comparison. Each narrows the bounds, in the end to a few message times."""


@dataclass(frozen=True, slots=True)
class ClockReading:
    """A clock beside that of rank 0, in nanoseconds.

    Attributes:
        at: the time of the reading, by the clock itself.
        offset: its time less that of rank 0's clock.
        uncertainty: the offset is wrong by no more than this.
    """

    at: int
    offset: int
    uncertainty: int


@dataclass(frozen=True, slots=True)
class _Bounds:
    """The least and the greatest offset that there can be."""

    low: int
    high: int

    def both(self, other: _Bounds) -> _Bounds:
        return _Bounds(max(self.low, other.low), min(self.high, other.high))

    def reading(self, at: int) -> ClockReading:
        half = max(0, self.high - self.low + 1) // 2
        return ClockReading(at, (self.low + self.high) // 2, half)


def compare_clocks(world: World) -> list[ClockReading]:
    """A reading for each rank, the same on all ranks; collective.

    Every rank comes to a barrier before any rank leaves it. So rank 0 comes before another rank
    leaves, and the other rank comes before rank 0 leaves. Each barrier bounds the offset of the two
    clocks from both sides, however long messages take. Ranks of one machine read one clock, as far
    as the bounds allow.
    """
    if world.is_virtual:
        return [ClockReading(perf_counter_ns(), 0, 0)] * world.size
    came, left = [], []
    for _ in range(ROUNDS):
        came.append(perf_counter_ns())
        world.allgather(None)
        left.append(perf_counter_ns())
    return readings(world.allgather((came, left)), world.nodes)


def readings(
    meetings: Sequence[tuple[list[int], list[int]]], nodes: Sequence[int]
) -> list[ClockReading]:
    """Derive the offsets of clocks from barriers of the ranks.

    Args:
        meetings: for each rank, when it came to each barrier and when it left, by its own clock.
        nodes: for each rank the number of its machine.
    """
    bounds = [_bounds(meetings[0], rank_times) for rank_times in meetings]
    shared = _of_machines(bounds, nodes)
    return [bound.reading(left[-1]) for bound, (_, left) in zip(shared, meetings, strict=True)]


def _bounds(
    root_times: tuple[list[int], list[int]], rank_times: tuple[list[int], list[int]]
) -> _Bounds:
    (came0, left0), (came, left) = root_times, rank_times
    return _Bounds(
        max(arrival - departure for arrival, departure in zip(came, left0, strict=True)),
        min(departure - arrival for departure, arrival in zip(left, came0, strict=True)),
    )


def _of_machines(bounds: Sequence[_Bounds], nodes: Sequence[int]) -> list[_Bounds]:
    """Bounds, narrowed by those of other ranks of the same machine if these fit together."""
    machine_bounds: dict[int, _Bounds] = {nodes[0]: _Bounds(0, 0)}
    for bound, node in zip(bounds, nodes, strict=True):
        machine_bounds[node] = machine_bounds[node].both(bound) if node in machine_bounds else bound
    together = [machine_bounds[node] for node in nodes]
    return [
        joint if joint.low <= joint.high else alone
        for joint, alone in zip(together, bounds, strict=True)
    ]


def common_time(time: int, first: ClockReading, last: ClockReading) -> float:
    """Convert a time of a rank's clock to rank 0's, between two readings of that clock.

    Clocks are taken to drift evenly.
    """
    span = last.at - first.at
    share = (time - first.at) / span if span > 0 else 0.0
    return time - (first.offset + (last.offset - first.offset) * share)
