"""How an engine makes variants while it serves: the steps, and what is served between them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from examples.serve import collector, gated, growing
from examples.serve.collector import NEVER, settle
from examples.serve.gated import GatedGraphs, Kernels
from examples.serve.growing import GrowingEngine
from examples.serve.settings import Options

Events = list[tuple[str, int]]


class Rows(int):
    """A size that is a number of rows."""

    def holds(self, needed: int) -> bool:
        return self >= needed

    @property
    def cost(self) -> tuple[int, ...]:
        return (int(self),)


class Graph:
    """Of one size; its executions end at once."""

    def __init__(self, size: int, events: Events) -> None:
        self._size, self._events = size, events

    def execute(self) -> Graph:
        self._events.append(("run", self._size))
        return self

    def result(self) -> None:
        pass


class Graphs:
    """Of sizes, each of which is traced and then bound."""

    def __init__(self, events: Events) -> None:
        self.compiled: dict[int, tuple[Graph, ...]] = {}
        self.is_ready = True
        self.when_ready: Callable[[], None] = lambda: None
        self._events, self._traced = events, set[int]()

    def advance(self, size: int) -> None:
        if size in self._traced:
            self.compiled[size] = (Graph(size, self._events),)
        self._events.append(("bind" if size in self._traced else "trace", size))
        self._traced.add(size)


class Engine(GrowingEngine[int]):
    """An engine whose variants are numbers."""

    def examples(self, size: int) -> list[tuple[Any, ...]]:
        return [()]

    def may_serve(self, size: int, ideal: int) -> bool:
        return size >= ideal

    def general(self, ideal: int) -> int:
        return ideal


def test_a_slice_does_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each slice does something, and the last one says that the variant is complete."""
    monkeypatch.setattr(growing, "SLICE", -1.0)
    events: Events = []
    engine = Engine(Graphs(events), [7, 8], warm_ups=2, in_flight=1)  # type: ignore[arg-type]
    slices = []
    while engine.due(idle=True):
        count = len(events)
        is_complete = engine.improve()
        slices.append((*events[count:], is_complete))
        assert (7 in engine.usable) == (len(slices) >= 5)
    made = [(("trace", n), ("bind", n), *[("run", n)] * 3) for n in (7, 8)]
    assert slices == [(step, number == 4) for steps in made for number, step in enumerate(steps)]


def test_a_slice_goes_on_while_it_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "SLICE", float("inf"))
    events: Events = []
    engine = Engine(Graphs(events), [7], warm_ups=2, in_flight=1)  # type: ignore[arg-type]
    assert engine.improve()
    assert events == [("trace", 7), ("bind", 7), *[("run", 7)] * 3]


def test_a_slice_ends_when_kernels_are_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """So requests are served beside them, and the variant is bound when they are made."""
    monkeypatch.setattr(growing, "SLICE", float("inf"))
    events: Events = []
    graphs = Graphs(events)
    engine = Engine(graphs, [7], warm_ups=1, in_flight=1)  # type: ignore[arg-type]
    traced = graphs.advance

    def advance(size: int) -> None:
        traced(size)
        graphs.is_ready = size in graphs.compiled

    graphs.advance = advance  # type: ignore[method-assign]
    assert not engine.improve()
    assert events == [("trace", 7)]
    assert not engine.due(idle=True)
    graphs.is_ready = True
    assert engine.improve()
    assert events[1:] == [("bind", 7), ("run", 7), ("run", 7)]


def test_a_busy_engine_leaves_what_an_idle_one_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until work has lost as much as it will wait for the variant."""
    monkeypatch.setattr(growing, "SLICE", -1.0)
    events: Events = []
    engine = Engine(Graphs(events), [7], warm_ups=1, in_flight=1)  # type: ignore[arg-type]
    assert not engine.improve()
    engine.rest(0.0)
    assert not engine.due(idle=False)
    assert engine.due(idle=True)
    engine.asked[7] = growing.PRICE
    assert engine.due(idle=False)
    assert not engine.improve()
    assert events == [("trace", 7), ("bind", 7)]


def test_a_busy_engine_makes_what_has_cost_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes two seconds, and requests have waited for nine of the latest variant."""
    clock = [0.0]
    monkeypatch.setattr(growing, "monotonic", lambda: clock[0])
    monkeypatch.setattr(growing, "SLICE", float("inf"))
    events: Events = []
    engine = Engine(Graphs(events), [Rows(8)], warm_ups=1, in_flight=1)  # type: ignore[arg-type]
    traced, ran = engine.graphs.advance, Graph.execute

    def advance(size: int) -> None:
        clock[0] += 2.5
        traced(size)  # type: ignore[arg-type]

    def execute(graph: Graph) -> Graph:
        clock[0] += 2.0
        return ran(graph)

    engine.graphs.advance = advance  # type: ignore[method-assign]
    monkeypatch.setattr(Graph, "execute", execute)
    assert engine.improve()
    assert engine.longest_slice == 9.0
    clock[0] += 1000.0
    waits = []
    for _ in range(10):
        assert engine.variant(Rows(4)) == 8
        waits.append(engine.due(idle=False))
    assert waits == [False] * 8 + [True] * 2
    assert engine.variant(Rows(3)) == 8
    assert engine.improve()
    assert not engine.due(idle=True), "it serves three as well"
    assert engine.variant(Rows(4)) == 4
    assert not engine.asked
    assert engine.variant(Rows(3)) == 4
    assert engine.asked == {3: pytest.approx(0.1)}, "four have taken as long as eight"


@pytest.mark.parametrize("error", [None, ValueError("no kernels")])
def test_old_objects_are_left_out_while_kernels_are_made(error: Exception | None) -> None:
    """A collection of all objects would hold up a step. Afterwards they are visited again."""
    before, seen = gc.get_threshold(), list[tuple[int, ...]]()

    class Lowered:
        def fuse_ahead(self, *_: object, **options: object) -> None:
            seen.append(gc.get_threshold())
            if error is not None:
                raise error

    done: list[bool] = []
    kernels = Kernels([Lowered()], "held", "", 2, lambda: done.append(kernels.is_done))  # type: ignore[list-item]
    kernels.start()
    kernels.join()
    assert done == [True]
    assert seen == [(*before[:2], NEVER)]
    assert gc.get_threshold() == before


def test_what_is_settled_is_visited_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage is not kept: it is collected first."""
    calls: list[str] = []
    monkeypatch.setattr(collector.gc, "collect", lambda: calls.append("collect"))
    monkeypatch.setattr(collector.gc, "freeze", lambda: calls.append("freeze"))
    settle()
    assert calls == ["collect", "freeze"]


class Gate:
    """A gate that is closed at once."""

    def serve(self) -> None:
        pass


class Following(GatedGraphs[int]):
    """The graphs of a rank that follows; a size that comes again is bound."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(Options())
        self._events = events
        self.open()

    def lower(self, size: int) -> list[Any]:
        self._events.append("trace")
        return []

    def open(self) -> None:
        self._gate: Any = Gate()


def test_other_ranks_settle_what_a_variant_has_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start, and with each variant that is bound; not behind a trace."""
    events: list[str] = []
    told = iter([7, 7, 8, 8, None])
    monkeypatch.setattr(gated, "settle", lambda: events.append("settle"))
    monkeypatch.setattr(gated.cg, "allgather", lambda _: [next(told)])
    graphs = Following(events)
    graphs.follow()
    assert events == ["settle", "trace", "settle", "trace", "settle"]
    assert set(graphs.compiled) == {7, 8}
