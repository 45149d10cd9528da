"""Reports of an execution that a device has not ended; its streams are threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cg.backends.agreement.plan_hash import plan_hash
from cg.backends.devices.programs.capture import WARM_UPS
from cg.backends.devices.programs.pending_work import MOST, PendingWork
from cg.backends.devices.stream_order import StreamEvent, StreamOrder
from cg.backends.failures.flight import Position
from cg.backends.fake.queues import FakeEvent
from cg.ir.attributes import Stream
from cg.ir.text.parser import parse_module
from tests.backends.devices.patience import loose_device

from ..conformance_cases import pipeline
from .ranks import ThreadWorld, on_ranks, pause
from .ranks import bound as bound_on
from .test_order import captured

PLAN = parse_module("""
module @step phase=scheduled world=2 {
  channel 0 {ranks = {0,1}}
  channel 1 {ranks = {1,0}}
  program @0(%x: f32[2]) {
    %r = recv() {chan = 1, peer = 1, seq = 0, stream = recv} : future<f32[2]>
    %q = recv() {chan = 1, peer = 1, seq = 1, stream = recv} : future<f32[2]>
    %s = send(%x) {chan = 0, graph = 3, peer = 1, seq = 0, stream = send} : future<unit>
    return()
  }
  program @1() { return() }
}
""")
FIRST, SECOND, SENT = 0, 1, 2


class Bound:
    """The program of rank 0 as it is on a device whose streams are held up."""

    def __init__(self) -> None:
        self.device = loose_device()
        self.order = StreamOrder(self.device)  # type: ignore[arg-type]
        self.events: dict[int, StreamEvent] = {}
        self.on_device: dict[int, FakeEvent] = {}
        for index in (FIRST, SECOND, SENT):
            self.events[index] = StreamEvent(self.order)
            self.on_device[index] = self.device.events[-1]
        self.gates: list[threading.Event] = []
        self.execution = 5

    def put(self, index: int, stream: Stream) -> threading.Event:
        """Put a message on its stream; it ends when the event is set."""
        gate, queue = threading.Event(), self.device.stream(stream)
        self.gates.append(gate)
        queue.put("message", lambda: _held(gate))
        self.events[index].record(queue)  # type: ignore[arg-type]
        return gate

    def end(self, gate: threading.Event, index: int) -> None:
        """Let a message end."""
        gate.set()
        self.on_device[index].synchronize()

    def unfinished(self, *segments: Any) -> str:
        work = PendingWork(
            PLAN.programs[0],
            PLAN,
            list(self.events.items()),
            segments,
            lambda: Position(0, self.execution, 0, None, running=False),
        )
        assert work.name == f"step 'step' (plan {plan_hash(PLAN)[:16]})"
        return work.unfinished(5)


def _held(gate: threading.Event) -> None:
    gate.wait(20)


def segment(number: int, behind: StreamEvent | None = None, is_replayed: bool = True) -> Any:
    return SimpleNamespace(number=number, behind=behind, is_replayed=is_replayed)


@pytest.fixture
def bound() -> Iterator[Bound]:
    made = Bound()
    yield made
    for gate in made.gates:
        gate.set()


def test_the_message_that_a_stream_is_at(bound: Bound) -> None:
    first = bound.put(FIRST, Stream.RECV)
    second = bound.put(SECOND, Stream.RECV)
    assert bound.unfinished() == (
        "  stream recv: `%r = recv() {chan = 1, peer = 1, seq = 0, stream = recv} : "
        "future<f32[2]>`, message 0 of channel 1 from rank 1, and 1 more behind it"
    )
    bound.end(first, FIRST)
    assert bound.unfinished().endswith("message 1 of channel 1 from rank 1")
    bound.end(second, SECOND)
    assert bound.unfinished() == "  its messages have ended, so it is at a kernel of a method"


def test_nothing_is_said_of_an_execution_that_another_is_put_behind(bound: Bound) -> None:
    bound.put(FIRST, Stream.RECV)
    bound.execution = 6
    assert bound.unfinished() == (
        "  a part of it that is not known, since the host has put what is of execution 6 behind it"
    )


def test_the_first_graph_that_has_not_ended(bound: Bound) -> None:
    passed, open_ = StreamEvent(bound.order), StreamEvent(bound.order)
    gate, queue = threading.Event(), bound.device.stream(Stream.SEND)
    bound.gates.append(gate)
    queue.put("graph", lambda: _held(gate))
    open_.record(queue)  # type: ignore[arg-type]
    told = bound.unfinished(segment(2, passed), segment(3, open_), segment(4, open_))
    assert told == (
        "  graph 3, which begins with `%s = send(%x) {chan = 0, graph = 3, peer = 1, seq = 0, "
        "stream = send} : future<unit>`: at one of its messages (message 0 of channel 0 to rank "
        "1), or at a kernel of a method; behind it: graphs 4"
    )
    assert "graph 3" in bound.unfinished(segment(3))  # the only one, with no event behind it
    assert "graph" not in bound.unfinished(segment(3, open_, is_replayed=False))


def test_of_many_messages_of_a_graph_some_are_named(bound: Bound) -> None:
    bound.events = {}
    work = PendingWork(
        PLAN.programs[0],
        PLAN,
        [(SENT, StreamEvent(bound.order))] * (MOST + 2),
        [segment(3)],
        lambda: Position(0, 5, 0),
    )
    assert "; 2 more)" in work.unfinished(5)


def test_a_device_that_has_failed_says_nothing(bound: Bound) -> None:
    bound.put(FIRST, Stream.RECV)

    def query() -> bool:
        raise RuntimeError("device-side assert triggered")

    bound.on_device[FIRST].query = query  # type: ignore[method-assign]
    assert "since the device has failed: device-side assert triggered" in bound.unfinished()


def _unheard(self: FakeEvent) -> bool:
    return False


def test_a_program_that_was_captured_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    case = pipeline("p", 2, 2)
    monkeypatch.setattr(FakeEvent, "query", _unheard)  # nothing waits for an event by it

    def play(world: ThreadWorld) -> list[str]:
        executable = captured(world, case)
        told = []
        for execution in range(WARM_UPS + 1):
            executable.run(case.inputs(execution)[world.rank], pause)
            told.append(executable.work.unfinished(execution))
            world.barrier()
        return told

    for rank, told in enumerate(on_ranks(2, play)):
        assert all(each.startswith("  stream ") for each in told[:WARM_UPS])
        assert told[-1].startswith("  graph 0, which begins with ")
        way = "to rank 1" if rank == 0 else "from rank 0"
        assert f" of channel 0 {way}" in told[-1]
        assert "stream" not in told[-1].split(": at one of its messages")[1]


TWO_GRAPHS = """
module @step phase=scheduled world=1 {
  function @a.first(f32[2]) -> (f32[2]) {effect = pure, kind = graph}
  function @a.opaque(f32[2]) -> (f32[2]) {effect = write, kind = opaque}
  program @0(%x: f32[2]) {
    %a = call(%x) {fn = @a.first, graph = 0, stream = compute} : f32[2]
    %b = call(%a) {fn = @a.opaque, stream = compute} : f32[2]
    %c = call(%b) {fn = @a.first, graph = 1, stream = compute} : f32[2]
    return(%c)
  }
}
"""


def test_of_several_graphs_it_is_known_which_have_ended() -> None:
    def play(world: ThreadWorld) -> str:
        bodies = {"a.first": lambda x: (x * 2,), "a.opaque": lambda x: (x + 1,)}
        executable = bound_on(world, parse_module(TWO_GRAPHS), bodies)
        for _ in range(WARM_UPS + 1):
            executable.run([torch.ones(2)], pause)
        execution = executable.execution
        first, second = executable.segments
        assert (first.replays, second.replays) == (1, 1)
        assert "graph" not in executable.work.unfinished(execution)
        assert second.behind is not None
        second.behind._event.query = lambda: False  # type: ignore[method-assign]
        return executable.work.unfinished(execution)

    (told,) = on_ranks(1, play)
    assert told.startswith("  graph 1, which begins with `%c = call(%b)")
    assert told.endswith(": at a kernel of a method")
