"""One graph of a call and its backward, which may not have been read yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import fx

from ...ir.location import Location
from ..lazy import Lazy
from ..values.actor_state import StateTensor
from ..values.specs import Tree
from .purity.changes import Initialization, Rebind
from .purity.function_log import FunctionLog
from .purity.op_log import OpLog
from .stored.plain_text import Json


@dataclass(frozen=True)
class JointNodes:
    """The graph of a call and its backward. Nodes belong to `graph`; values are fakes.

    Attributes:
        owner: holds the constants that the graph refers to.
        graph: forward, then backward.
        state: the placeholder of each tensor of the state.
        inputs: placeholders of the value inputs.
        cotangents: nodes that stand for the cotangents of the wanted outputs.
        outputs: nodes of the value outputs.
        rebinds: nodes of the tensors that the call has put into slots.
        input_grads: the cotangents of the wanted inputs.
        state_grads: the gradients of the trained tensors that get one.
        forward: names of the nodes that exist without the backward.
        locations: the user's lines of nodes, by name.
    """

    owner: torch.nn.Module
    graph: fx.Graph
    state: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    cotangents: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    rebinds: tuple[fx.Node, ...]
    input_grads: tuple[fx.Node, ...]
    state_grads: tuple[fx.Node, ...]
    forward: frozenset[str]
    locations: Mapping[str, Location]

    def on(
        self,
        graph: fx.Graph,
        forward: frozenset[str],
        copy: Callable[[fx.Node], fx.Node],
        end: Callable[[fx.Node], fx.Node],
        further: Sequence[fx.Node] = (),
    ) -> JointNodes:
        """The nodes of another graph that stand for these.

        Args:
            graph: the graph.
            forward: names of its nodes that exist without the backward.
            copy: gives the node that stands for another.
            end: the same for results, which it is asked for in their order.
            further: further placeholders of state.
        """
        return JointNodes(
            owner=self.owner,
            graph=graph,
            state=(*map(copy, self.state), *further),
            inputs=tuple(map(copy, self.inputs)),
            cotangents=tuple(map(copy, self.cotangents)),
            outputs=tuple(map(end, self.outputs)),
            rebinds=tuple(map(end, self.rebinds)),
            input_grads=tuple(map(end, self.input_grads)),
            state_grads=tuple(map(end, self.state_grads)),
            forward=forward,
            locations=self.locations,
        )


Lines: TypeAlias = Callable[[Location], Location | None]
"""Gives the line of today for a line of an earlier start; None: there is none."""


@dataclass(frozen=True)
class Kept:
    """The pieces that an earlier start has cut a joint graph into.

    Attributes:
        pieces: the JSON of the pieces that it was cut into, with their code.
        line_of: gives the line of today for one of its lines; None: there is none.
        mend: is told why something of it is made anew.
    """

    pieces: Lazy[Json]
    line_of: Lines
    mend: Callable[[str], None]


@dataclass(frozen=True)
class Joint:
    """One graph of a call and its backward, and what a step has to know of it.

    A graph of an earlier start is read when something asks for its nodes.

    Attributes:
        nodes: the graph.
        tensors: the tensors of the state.
        rebound: slots in which the call has put a new tensor.
        graded: trained tensors of the state that get a gradient.
        wanted_outputs: the outputs of `Wanted`.
        wanted_inputs: the inputs of `Wanted` that a wanted output depends on.
        reaching: for each output, the value inputs that autograd may send its gradient to.
        references: indices of outputs that share memory with the state.
        referred: indices of the state tensors whose memory outputs share.
        views: pairs of an output and an input that share memory.
        results: what the call returns.
        draws: whether it draws random numbers.
        log: the operators of the forward; None of a trace that another process has made.
        functions: the torch functions of the forward, in order.
        written, backward_written: indices of the state tensors that the forward, and the backward,
            write to in place.
        reads: names of attributes that the trace relied on, by object id.
        initial: changes that are right only if the first call alone makes them.
        kept: the pieces of an earlier start; None of a trace of this process.
    """

    nodes: Lazy[JointNodes]
    tensors: tuple[StateTensor, ...]
    rebound: tuple[Rebind, ...]
    graded: tuple[StateTensor, ...]
    wanted_outputs: tuple[int, ...]
    wanted_inputs: tuple[int, ...]
    reaching: tuple[tuple[int, ...], ...]
    references: tuple[int, ...]
    referred: tuple[int, ...]
    views: tuple[tuple[int, int], ...]
    results: Tree
    draws: bool
    log: OpLog | None
    functions: FunctionLog
    written: frozenset[int]
    backward_written: frozenset[int]
    reads: dict[int, set[str]]
    initial: tuple[Initialization, ...]
    kept: Kept | None = None

    @property
    def owner(self) -> torch.nn.Module:
        return self.nodes.value.owner

    @property
    def graph(self) -> fx.Graph:
        return self.nodes.value.graph

    @property
    def state(self) -> tuple[tuple[fx.Node, StateTensor], ...]:
        """For each tensor of the state, its placeholder and the tensor."""
        return tuple(zip(self.nodes.value.state, self.tensors, strict=True))

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return self.nodes.value.inputs

    @property
    def cotangents(self) -> tuple[fx.Node, ...]:
        return self.nodes.value.cotangents

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        return self.nodes.value.outputs

    @property
    def rebinds(self) -> tuple[tuple[Rebind, fx.Node], ...]:
        """Slots in which the call has put a new tensor, with the tensor's node."""
        return tuple(zip(self.rebound, self.nodes.value.rebinds, strict=True))

    @property
    def input_grads(self) -> tuple[fx.Node, ...]:
        return self.nodes.value.input_grads

    @property
    def state_grads(self) -> tuple[tuple[StateTensor, fx.Node], ...]:
        """Trained tensors of the state that get a gradient, with its node."""
        return tuple(zip(self.graded, self.nodes.value.state_grads, strict=True))

    @property
    def forward(self) -> frozenset[str]:
        return self.nodes.value.forward

    @property
    def locations(self) -> Mapping[str, Location]:
        return self.nodes.value.locations

    def relocated(self, line_of: Lines) -> Joint:
        """The trace of an earlier start, with its lines as they are now."""
        nodes, kept = self.nodes, self.kept

        def moved() -> JointNodes:
            lines = {name: line_of(line) for name, line in nodes.value.locations.items()}
            new = {name: line for name, line in lines.items() if line is not None}
            return replace(nodes.value, locations=new)

        kept = None if kept is None else replace(kept, line_of=line_of)
        return replace(self, nodes=Lazy(moved), kept=kept)
