"""The body of a traced function: the code that a rank runs, generated when it is needed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import fx

from ....ir.location import Location
from ...lazy import Lazy
from ...values.interface import Bodies, Body, RankBodies
from ..autodiff.subgraphs import PieceNodes

Compute = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""Computes a graph: takes a list with a tensor for each placeholder; gives the output's tensors.

It may empty the list, so that it can free tensors before it returns.
"""

Compiler = Callable[[fx.GraphModule, Sequence[torch.Tensor]], Compute]
"""Makes a `Compute` of a graph, and of fakes of the tensors that it will take."""

Run = Callable[..., Sequence[Any]]
"""Takes the inputs of a function, and returns all its outputs."""

Locate = Callable[[TracebackType | None], Location | None]
"""Gives the user's line for a traceback, or None."""


@dataclass(frozen=True, eq=False)
class GraphBody:
    """The body of a traced function. It can be called; frequent callers call `run`.

    Its code is generated at the first use of `run` or `locate`: a trace makes many bodies that
    never run here, since another body takes their place, or another process runs them.

    Attributes:
        generate: gives `run` and `locate`.
        nodes: the graph that it runs, with the user's lines.
        state: gives the parameters and buffers that it works on.
        trained: gives the parameters to whose `.grad` it adds.
        new_gradients: memory for `.grad` of parameters that have none, by the parameter's id; empty
            if there is no such memory.
        rebinds: whether it replaces buffers by new tensors.
        refit: gives a body that does the same, but adds gradients that are products by the product
            itself (`autodiff/products.py`). If it gets a compiler, the graph is compiled as a
            whole.
    """

    generate: Callable[[], tuple[Run, Locate]]
    nodes: Lazy[PieceNodes]
    state: Callable[[], list[torch.Tensor]]
    trained: Callable[[], list[torch.Tensor]]
    new_gradients: dict[int, torch.Tensor]
    rebinds: bool
    refit: Callable[[Compiler | None], GraphBody]

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        return self.run(*inputs)

    def graph_and_lines(self) -> tuple[fx.Graph, Mapping[fx.Node, Location]]:
        """The graph that it runs, and the user's line of its nodes, where it is known."""
        return self.nodes.value.graph, self.nodes.value.locations

    @functools.cached_property
    def _generated(self) -> tuple[Run, Locate]:
        return self.generate()

    @property
    def run(self) -> Run:
        """Takes the function's inputs, and returns all its outputs."""
        return self._generated[0]

    @property
    def locate(self) -> Locate:
        """Gives the user's line for a traceback through the body, or None."""
        return self._generated[1]

    def wrapped(self, wrap: Callable[[Body], Body]) -> GraphBody:
        """The body with code around it, which a refitted body has as well."""

        def generate() -> tuple[Run, Locate]:
            return wrap(self.run), self.locate

        return GraphBody(
            generate,
            nodes=self.nodes,
            state=self.state,
            trained=self.trained,
            new_gradients=self.new_gradients,
            rebinds=self.rebinds,
            refit=lambda by: self.refit(by).wrapped(wrap),
        )


class FusedBody(GraphBody):
    """The body of a traced function whose graph is computed by a single call.

    Its generated code takes the inputs in a list, and can free them early. Code that is wrapped
    around it takes them as arguments, and holds them until the call returns: `wrapped` gives a
    `GraphBody`.
    """

    @functools.cached_property
    def run(self) -> Run:
        """Takes the function's inputs, and returns all its outputs."""
        run_boxed = self.run_boxed
        return lambda *inputs: run_boxed([*inputs])

    @property
    def run_boxed(self) -> Run:
        """Takes the inputs in a list, and empties it, so that each is freed after its last use."""
        return self._generated[0]


def wrapped(body: Bodies, wrap: Callable[[Body], Body]) -> Bodies:
    """The body with code around it: `wrap` takes a function, and returns the one to run instead."""
    return each_body(body, lambda inner: wrapped_body(inner, wrap))


def each_body(body: Bodies, change: Callable[[Body], Body]) -> Bodies:
    """Apply `change` to a body, or to the body of each rank."""
    if isinstance(body, RankBodies):
        return RankBodies({rank: change(rank_body) for rank, rank_body in body.of_rank.items()})
    return change(body)


def wrapped_body(body: Body, wrap: Callable[[Body], Body]) -> Body:
    """The body of one rank with code around it, as in `wrapped`."""
    if isinstance(body, GraphBody):
        return body.wrapped(wrap)
    return functools.wraps(body)(wrap(body))
