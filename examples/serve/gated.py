"""Graphs of an engine on all ranks: variants that are compiled before it serves, and behind.

Each variant is a graph of its own, and all use the same actors. So a variant can be added while
others are open. It takes two steps to which all ranks have to come: one traces it, and one binds
it. For each the other ranks serve until a graph closes that nothing is executed by, the *gate*: its
end stands in the order of the driver's commands, so all ranks leave at the same execution, with
nothing in flight. Between the two steps all ranks serve, while a thread of each has its compiler
make the kernels of the variant, if there is one.
"""

from __future__ import annotations

import itertools
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import cg

from .collector import old_objects_unvisited, settle
from .settings import Options

log = logging.getLogger("serve")

Size = TypeVar("Size")
"""The size of a variant."""


class Kernels(threading.Thread):
    """A thread that has a compiler make the kernels of a variant on this rank.

    If it fails, `GatedGraphs.bind` tries again, and raises the error on all ranks.

    Args:
        lowered: the graphs of the variant.
        fuse, passes, max_inflight: as `cg.Lowered.compile` takes them.
        when_done: called when they are made.

    Attributes:
        is_done: whether they are made, or cannot be.
    """

    def __init__(
        self,
        lowered: Sequence[cg.Lowered],
        fuse: str,
        passes: str,
        max_inflight: int,
        when_done: Callable[[], None],
    ) -> None:
        super().__init__(name="serve kernels", daemon=True)
        self._lowered, self._fuse, self._when_done = lowered, fuse, when_done
        self._passes, self._max_inflight = passes, max_inflight
        self.is_done = False

    def run(self) -> None:
        try:
            with old_objects_unvisited():
                for lowered in self._lowered:
                    lowered.fuse_ahead(
                        self._fuse, passes=self._passes, max_inflight=self._max_inflight
                    )
        except Exception as error:
            log.info("kernels are made while requests wait: %s", error)
        finally:
            self.is_done = True
            self._when_done()


class GatedGraphs(ABC, Generic[Size]):
    """The variants of an engine; made on all ranks.

    Args:
        options: how they are compiled.

    Attributes:
        compiled: the variants: of decode batches a graph for each group, of others one.
        when_ready: called by a thread when it has made the kernels of a traced variant.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.compiled: dict[Size, tuple[cg.Compiled, ...]] = {}
        self._gate: cg.Compiled | None = None
        self._traced: dict[Size, list[cg.Lowered]] = {}
        self._kernels: Kernels | None = None
        self.when_ready: Callable[[], None] = lambda: None

    @abstractmethod
    def lower(self, size: Size) -> list[cg.Lowered]:
        """The graphs of a variant, to be compiled; collective."""

    @property
    def is_ready(self) -> bool:
        """False while the kernels of a traced variant are made on this rank."""
        return self._kernels is None or self._kernels.is_done

    def compile(self, size: Size) -> None:
        """Compile a variant; collective."""
        self._traced[size] = self.lower(size)
        self.bind(size)

    def bind(self, size: Size) -> None:
        """Bind a traced variant, once its kernels are made; collective."""
        self._join()
        options = self._options
        self.compiled[size] = tuple(
            lowered.compile(
                max_inflight=options.in_flight, fuse=options.fuse, passes=options.passes
            )
            for lowered in self._traced.pop(size)
        )

    def _join(self) -> None:
        if self._kernels is not None:
            self._kernels.join()
            self._kernels = None

    def open(self) -> None:
        """Open the gate, so that the other ranks serve in `follow`; collective."""
        self._gate = gate.lower(0).compile(max_inflight=1)

    def advance(self, size: Size) -> None:
        """On rank 0, with nothing in flight: trace a variant, or bind it if it is traced.

        The others follow.
        """
        self._call(size)
        self._make(size)

    def follow(self) -> None:
        """On the other ranks: serve, and trace and bind what rank 0 does, until it closes."""
        settle()
        while True:
            assert self._gate is not None, "it is opened first"
            self._gate.serve()
            size = cg.allgather(None)[0]
            if size is None:
                break
            self._make(size)
            if size in self.compiled:
                settle()
        for graph in self.graphs():
            graph.serve()

    def _make(self, size: Size) -> None:
        """Bind a variant that is traced; or trace it, and have a thread make its kernels."""
        if size in self._traced:
            self.bind(size)
            self.open()
            return
        self._join()  # a trace and a compiler put things in place of others
        self._traced[size] = self.lower(size)
        self.open()
        options = self._options
        if options.fuse is not None:
            more = options.fuse, options.passes, options.in_flight
            self._kernels = Kernels(self._traced[size], *more, lambda: self.when_ready())
            self._kernels.start()

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
