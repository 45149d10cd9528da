"""The body of a traced function: what a rank runs, generated when something asks for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import fx

from ....ir.location import Location
from ...values.interface import Bodies, Body, RankBodies

Compute = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""Computes a graph: takes a tensor for each of its placeholders, gives those of its output.

It may empty the list, and does if it lets go of tensors before it returns.
"""

Compiler = Callable[[fx.GraphModule, Sequence[torch.Tensor]], Compute]
"""Makes that of a graph, and of tensors like those that it will be given, which are fakes."""

Run = Callable[..., Sequence[Any]]
"""Takes the inputs of a function, and returns all its outputs."""

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
        locations: the user's line of its nodes, as far as they are known.
        state: gives the parameters and buffers that it works on.
        trained: gives the parameters to whose `.grad` it adds.
        new_gradients: memory for `.grad` of those that have none, by their id, while it has any.
        rebinds: whether it puts new tensors in the place of buffers.
        refit: gives a body that does the same, but adds gradients that are products by the
            product itself (`products`); with its graph compiled as a whole if it gets a compiler.
    """

    generate: Callable[[], tuple[Run, Locate]]
    graph: fx.Graph
    locations: Mapping[fx.Node, Location]
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

        return GraphBody(
            generate,
            graph=self.graph,
            locations=self.locations,
            state=self.state,
            trained=self.trained,
            new_gradients=self.new_gradients,
            rebinds=self.rebinds,
            refit=lambda by: self.refit(by).wrapped(wrap),
        )


class FusedBody(GraphBody):
    """The body of a traced function whose graph is computed by a single call.

    What is generated takes the inputs in a list. Code that is wrapped around it takes arguments,
    which it holds until the call returns, so it makes a `GraphBody`.
    """

    @functools.cached_property
    def run(self) -> Run:
        """Takes the function's inputs, and returns all its outputs."""
        run_boxed = self.run_boxed
        return lambda *inputs: run_boxed([*inputs])

    @property
    def run_boxed(self) -> Run:
        """Takes the inputs in a list, which it empties, so that each goes after its last use."""
        return self._generated[0]


def wrapped(body: Bodies, wrap: Callable[[Body], Body]) -> Bodies:
    """The body with code around it: `wrap` takes what runs it, and returns what runs instead."""
    return each_body(body, lambda inner: _wrapped(inner, wrap))


def each_body(body: Bodies, change: Callable[[Body], Body]) -> Bodies:
    """Apply `change` to a body, or to that of each rank."""
    if isinstance(body, RankBodies):
        return RankBodies({rank: change(rank_body) for rank, rank_body in body.of_rank.items()})
    return change(body)


def _wrapped(body: Body, wrap: Callable[[Body], Body]) -> Body:
    if isinstance(body, GraphBody):
        return body.wrapped(wrap)
    return functools.wraps(body)(wrap(body))
