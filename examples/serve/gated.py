"""Graphs of an engine on all ranks: variants that are compiled before it serves, and behind.

Each variant is a graph of its own, and all use the same actors. So a variant can be added while
others are open. To compile one, all ranks have to come to it. The other ranks serve until a graph
closes that nothing is executed by, the *gate*: its end stands in the order of the driver's
commands, so all ranks leave at the same execution, with nothing in flight.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import cg

from .settings import Options

Size = TypeVar("Size")
"""The size of a variant."""


class GatedGraphs(ABC, Generic[Size]):
    """The variants of an engine; made on all ranks.

    Args:
        options: how they are compiled.

    Attributes:
        compiled: the variants: of decode batches a graph for each group, of others one.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.compiled: dict[Size, tuple[cg.Compiled, ...]] = {}
        self._gate: cg.Compiled | None = None

    @abstractmethod
    def lower(self, size: Size) -> list[cg.Lowered]:
        """The graphs of a variant, to be compiled; collective."""

    def compile(self, size: Size) -> None:
        """Compile a variant; collective."""
        options = self._options
        self.compiled[size] = tuple(
            lowered.compile(
                max_inflight=options.in_flight, fuse=options.fuse, passes=options.passes
            )
            for lowered in self.lower(size)
        )

    def open(self) -> None:
        """Open the gate, so that the other ranks serve in `follow`; collective."""
        self._gate = gate.lower(0).compile(max_inflight=1)

    def add(self, size: Size) -> None:
        """On rank 0, with nothing in flight: compile a variant, while the others follow."""
        self._call(size)
        self.compile(size)
        self.open()

    def follow(self) -> None:
        """On the other ranks: serve, and compile what rank 0 adds, until it closes."""
        while True:
            assert self._gate is not None, "it is opened first"
            self._gate.serve()
            size = cg.allgather(None)[0]
            if size is None:
                break
            self.compile(size)
            self.open()
        for graph in self.graphs():
            graph.serve()

    def close(self) -> None:
        """On rank 0: end the executions in flight, then all ranks; idempotent."""
        if self._gate is not None:
            self._call(None)
            self._gate = None
        for graph in self.graphs():
            graph.close()

    def graphs(self) -> list[cg.Compiled]:
        """The graphs of all variants."""
        return list(itertools.chain.from_iterable(self.compiled.values()))

    def _call(self, size: Size | None) -> None:
        """Let the other ranks come out of `serve`, and tell them what is next."""
        assert self._gate is not None, "it is opened first"
        self._gate.close()
        cg.allgather(size)


@cg.trace(inputs=cg.on(0), outputs=cg.on(0))
def gate(number: int) -> int:
    """A graph that the other ranks serve, and that nothing is executed by."""
    return number
