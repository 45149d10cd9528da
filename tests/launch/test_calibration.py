"""Costs from recordings that are made up: what is counted, what is left out, what is averaged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import pytest

from cg.ir.ops import Call
from cg.ir.ops.module import Module
from cg.ir.pipeline.costs import Costs, Link
from cg.ir.text.parser import parse_module
from cg.ir.verify.communication import TimeSpan
from cg.ir.verify.verifier import verify
from cg.launch.measure.calibration import measured_costs
from cg.launch.measure.message_latency import message_latencies
from cg.launch.measure.recording import RecordedTimes
from cg.passes.simulate.program_times import RankTimes

STEP = """
module @step phase=scheduled world=2 {
  channel 0 {ranks = {0..1}}
  function @a.run() -> (f32[4]) {actor = a, effect = read, kind = opaque}
  function @b.run() -> (f32[4]) {actor = b, effect = read, kind = opaque}
  function @b.use(f32[4]) -> (f32[4]) {actor = b, effect = read, kind = opaque}
  program @0() {
    %x = call() {fn = @a.run, task = 0F0} : f32[4]
    %d = send(%x) {chan = 0, peer = 1, seq = 0, task = 0F0} : future<unit>
    %z = call() {fn = @a.run, task = 0F1} : f32[4]
    wait(%d)
    return()
  }
  program @1() {
    %w = call() {fn = @b.run} : f32[4]
    %r = recv() {chan = 0, peer = 0, seq = 0} : future<f32[4]>
    %v = wait(%r) : f32[4]
    %y = call(%v) {fn = @b.use, task = 1F0} : f32[4]
    return()
  }
}
"""


@pytest.fixture
def module() -> Module:
    made = parse_module(STEP)
    verify(made)
    return made


Times = Sequence[tuple[float, float]]


def recorded(module: Module, *times: Times) -> RecordedTimes:
    """A recording in which the calls of each rank start and end at these times."""
    spans: list[TimeSpan] = []
    ranks: list[RankTimes] = []
    for program, of_rank in zip(module.programs, times, strict=True):
        calls = [op for op in program.ops if isinstance(op, Call)]
        rank = program.rank or 0
        found = [TimeSpan(rank, op, *time) for op, time in zip(calls, of_rank, strict=True)]
        spans += found
        busy = sum(end - start for start, end in of_rank)
        ranks.append(RankTimes(rank, of_rank[0][0], of_rank[-1][1], busy, 0.0, math.nan, 0))
    return RecordedTimes(tuple(ranks), tuple(spans))


@dataclass
class World:
    """The part of a world that a calibration uses."""

    nodes: tuple[int, ...] = (0, 0)
    is_virtual: bool = False
    device: object = None


def costs_of(
    module: Module, recordings: Sequence[RecordedTimes], world: World | None = None
) -> Costs:
    """The costs, where a message of 16 bytes takes 0.5 ms back and forth, less what comes before.

    The two calls of rank 0 have 0.25 ms between them, in which a send is posted.
    """

    def try_edge(
        world: object,
        edge: tuple[int, int],
        largest: int,
        overhead: float,
    ) -> Link:
        assert (edge, largest) == ((0, 1), 16)
        return Link(0.5 - overhead)

    with mock.patch("cg.launch.measure.calibration.try_edge", try_edge):
        return measured_costs(world or World(), module, recordings)  # type: ignore[arg-type]


def test_what_is_message_latencies(module: Module) -> None:
    waits = recorded(module, [(0, 4), (4.25, 9)], [(0, 2), (4.75, 6)])
    busy = recorded(module, [(0, 4), (4.25, 9)], [(0, 4.5), (4.75, 6)])
    assert [one.time for one in message_latencies(module, [waits, busy, waits], (0, 0))] == [
        0.75,
        0.75,
    ]
    # Clocks of two machines say nothing about each other.
    assert list(message_latencies(module, [waits], (0, 1))) == []


def test_a_message_takes_what_it_takes_in_the_step(module: Module) -> None:
    waits = recorded(module, [(0, 4), (4.25, 9)], [(0, 2), (4.75, 6)])
    costs = costs_of(module, [waits])
    assert (costs.overhead, costs.post) == (0.0, 0.25)
    # 0.25 ms more than back and forth, of which 0.25 ms are the sender's.
    assert costs.channels == {0: Link(0.5)}
    assert costs.link == Link(0.5)
    assert costs.tcomm == (0.75, 0.0)


@pytest.mark.parametrize("world", [World(is_virtual=True), World((0, 1)), World(device=object())])
def test_where_the_step_shows_nothing_it_is_what_goes_back_and_forth(
    module: Module, world: World
) -> None:
    waits = recorded(module, [(0, 4), (4.25, 9)], [(0, 2), (4.75, 6)])
    assert costs_of(module, [waits], world).channels == {0: Link(0.25)}


def test_nothing_is_awaited_where_ranks_are_busy(module: Module) -> None:
    busy = recorded(module, [(0, 4), (4.25, 9)], [(0, 4.5), (4.75, 6)])
    assert costs_of(module, [busy]).channels == {0: Link(0.25)}


def test_times_are_means_over_what_is_usual(module: Module) -> None:
    """A median would leave out what is slow now and then, and so would be too short in all."""
    found = [
        recorded(module, [(0, 1), (1, 2)], [(0, 2), (5, 5 + last)])
        for last in (3.0, 1.0, 2.0, 90.0, 0.5)
    ]
    costs = costs_of(module, found)
    assert costs.functions["b.use"] == 2.0  # without the longest and the shortest
    assert costs.functions["a.run"] == 1.0
