"""The body of a traced function: what a rank runs, generated when something asks for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import fx

from ...ir.location import Location
from ..functions.interface import Bodies, Body, RankBodies

Compute = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""Computes a graph: takes a tensor for each of its placeholders, gives those of its output.

It may empty the list, and does if it lets go of tensors before it returns.
"""

Compiler = Callable[[fx.GraphModule, Sequence[torch.Tensor]], Compute]
"""Makes that of a graph, and of tensors like those that it will be given, which are fakes."""

Run = Callable[..., Sequence[Any]]
"""Takes the inputs of a function, and returns all its outputs."""

Boxed = Callable[[list[Any]], Sequence[Any]]
"""The same with the inputs in a list, which it empties, so that each goes after its last use."""

Locate = Callable[[TracebackType | None], Location | None]
"""The user's line that stands behind a traceback, or None."""


@dataclass(frozen=True, eq=False)
class GraphBody:
    """The body of a traced function. It can be called; who calls it often calls `run`.

    Its code is generated when something asks for `run` or `locate` first: a trace makes many bodies
    that nothing runs, be it that another one takes their place or that another process does.

    Attributes:
        generate: gives what `run` and `locate` are.
        graph: the graph that it runs.
        state: gives the parameters and buffers that it works on.
        trained: gives the parameters to whose `.grad` it adds.
        new_gradients: memory for `.grad` of those that have none, by their id, while it has any.
        rebinds: whether it puts new tensors in the place of buffers.
        refit: gives a body that does the same, but adds gradients that are products by the
            product itself (`products`); with its graph compiled as a whole if it gets a compiler.
    """

    generate: Callable[[], tuple[Run, Locate]]
    graph: fx.Graph
    state: Callable[[], list[torch.Tensor]]
    trained: Callable[[], list[torch.Tensor]]
    new_gradients: dict[int, torch.Tensor]
    rebinds: bool
    refit: Callable[[Compiler | None], GraphBody]

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        return self.run(*inputs)

    @functools.cached_property
    def _generated(self) -> tuple[Run, Locate]:
        return self.generate()

    @property
    def run(self) -> Run:
        """Takes the function's inputs, and returns all its outputs."""
        return self._generated[0]

    @property
    def locate(self) -> Locate:
        """Gives the user's line that stands behind a traceback through the body, or None."""
        return self._generated[1]

    def wrapped(self, wrap: Callable[[Body], Body]) -> GraphBody:
        """The body with code around it, which stays when it is refitted."""

        def generate() -> tuple[Run, Locate]:
            return wrap(self.run), self.locate

        refit = self.refit
        return GraphBody(
            generate,
            self.graph,
            self.state,
            self.trained,
            self.new_gradients,
            self.rebinds,
            refit=lambda by: refit(by).wrapped(wrap),
        )

    def returning_unit(self) -> GraphBody:
        """The body of a function whose results are of type unit."""

        def generate() -> tuple[Run, Locate]:
            run, locate = self._generated
            return _returning_unit(run), locate

        refit = self.refit
        return replace(self, generate=generate, refit=lambda by: refit(by).returning_unit())


@dataclass(frozen=True, eq=False)
class FusedBody(GraphBody):
    """The body of a traced function whose graph is computed by a single call.

    What `generate` gives is called boxed. With code around it, the body is called by arguments, and
    so no `FusedBody`.
    """

    @property
    def run(self) -> Run:
        """Takes the function's inputs, and returns all its outputs."""
        run_boxed = self.run_boxed
        return lambda *inputs: run_boxed([*inputs])

    @property
    def run_boxed(self) -> Boxed:
        """Does what `run` does, and lets the call empty the list of its inputs."""
        return self._generated[0]


def wrapped(body: Bodies, wrap: Callable[[Body], Body]) -> Bodies:
    """The body with code around it: `wrap` takes what runs it, and returns what runs instead."""
    return each_body(body, lambda each: _wrapped(each, wrap))


def each_body(body: Bodies, change: Callable[[Body], Body]) -> Bodies:
    """Apply `change` to a body, or to that of each rank."""
    if isinstance(body, RankBodies):
        return RankBodies({rank: change(each) for rank, each in body.of_rank.items()})
    return change(body)


def _wrapped(body: Body, wrap: Callable[[Body], Body]) -> Body:
    if isinstance(body, GraphBody):
        return body.wrapped(wrap)
    return functools.wraps(body)(wrap(body))


def returning_unit(body: Bodies) -> Bodies:
    """The body of a function whose results are of type unit."""
    return each_body(body, _with_unit)


def _with_unit(body: Body) -> Body:
    return body.returning_unit() if isinstance(body, GraphBody) else _wrapped(body, _returning_unit)


def _returning_unit(body: Body) -> Body:
    """What calls the body, by arguments or boxed, and returns a unit."""

    def run(*inputs: Any) -> Sequence[Any]:
        body(*inputs)
        return (None,)

    return run
