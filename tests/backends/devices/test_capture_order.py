"""Captured graphs have the order of their streams, with no edge that others imply."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cg.backends.devices.capture_order import CaptureOrder, Mark

from ...sampling import examples

Edges = list[tuple[int, ...]]


@dataclass(eq=False)
class Line:
    """A stream: what its next work stands behind in the graph, and by all of its waits."""

    graph: Graph
    is_captured: bool = False
    nodes: tuple[int, ...] = ()
    all_nodes: frozenset[int] = frozenset()

    def wait_event(self, mark: Marked) -> None:
        self.is_captured = True
        self.nodes = tuple(sorted({*self.nodes, *mark.nodes}))


@dataclass
class Marked:
    """An event: the nodes where its stream was."""

    nodes: tuple[int, ...]
    all_nodes: frozenset[int]


@dataclass
class Graph:
    """A device that captures: nodes by number, with the edges that they have and should imply."""

    edges: Edges = field(default_factory=list)
    wanted: Edges = field(default_factory=list)

    def put(self, line: Line) -> int:
        self.edges.append(line.nodes)
        self.wanted.append(tuple(line.all_nodes))
        line.nodes = (len(self.edges) - 1,)
        line.all_nodes = frozenset(line.nodes)
        return line.nodes[0]

    def nodes(self, line: Line) -> tuple[int, ...] | None:
        return line.nodes if line.is_captured else None

    def follow_alone(self, line: Line, event: Marked, nodes: tuple[int, ...]) -> None:
        assert event.nodes == nodes
        line.nodes = nodes


class Play:
    """Streams, the first of which is captured from the start, and their events."""

    def __init__(self, lines: int) -> None:
        self.graph = Graph()
        self.lines = [Line(self.graph) for _ in range(lines)]
        self.lines[0].is_captured = True
        self.order = CaptureOrder(self.graph)  # type: ignore[arg-type]
        self.events: list[tuple[Marked, Mark]] = []

    def put(self, at: int) -> int | None:
        return self.graph.put(self.lines[at]) if self.lines[at].is_captured else None

    def record(self, at: int) -> int | None:
        line = self.lines[at]
        if not line.is_captured:
            return None
        marked = Marked(line.nodes, line.all_nodes)
        self.events.append((marked, self.order.mark(line)))  # type: ignore[arg-type]
        return len(self.events) - 1

    def wait(self, at: int, number: int | None) -> None:
        if number is None:
            return
        line, (event, mark) = self.lines[at], self.events[number]
        line.all_nodes |= event.all_nodes
        self.order.wait(line, event, mark)  # type: ignore[arg-type]


def before(edges: Edges) -> list[frozenset[int]]:
    """For each node all that come before it."""
    found: list[frozenset[int]] = []
    for nodes in edges:
        found.append(frozenset(nodes).union(*(found[node] for node in nodes)))
    return found


LINES = 3


@st.composite
def actions(draw: st.DrawFn) -> tuple[Any, ...]:
    """Work, an event behind work, or a wait for one of the latest events."""
    name = draw(st.sampled_from(["put", "record", "wait", "wait"]))
    more = (draw(st.integers(0, 5)),) if name == "wait" else ()
    return (name, draw(st.integers(0, LINES - 1)), *more)


@given(actions=st.lists(actions(), min_size=20, max_size=60))
@examples(200)
def test_the_order_is_that_of_all_edges(actions: list[tuple[Any, ...]]) -> None:
    play = Play(LINES)
    play.put(0)
    for side in range(1, LINES):
        play.wait(side, play.record(0))
    for name, at, *back in actions:
        if back:
            play.wait(at, max(0, len(play.events) - 1 - back[0]))
        else:
            getattr(play, name)(at)
    assert before(play.graph.edges) == before(play.graph.wanted)


def test_a_chain_on_two_streams_is_a_chain() -> None:
    play = Play(2)
    play.wait(1, play.record(0))
    for _ in range(3):
        for here, there in ((0, 1), (1, 0)):
            play.put(here)
            play.wait(there, play.record(here))
    assert play.graph.edges == [(), (0,), (1,), (2,), (3,), (4,)]


def test_work_that_no_event_follows_is_waited_for() -> None:
    play = Play(2)
    play.put(0)
    play.wait(1, play.record(0))
    play.put(1)
    play.put(0)
    play.wait(1, play.record(0))
    assert play.put(1) == 3
    assert play.graph.edges[3] == (1, 2)


def test_an_event_is_waited_for_once() -> None:
    play = Play(2)
    play.put(0)
    event = play.record(0)
    play.wait(1, event)
    play.put(1)
    play.wait(1, event)
    play.put(1)
    assert play.graph.edges == [(), (0,), (1,)]
