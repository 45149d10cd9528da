"""The parts of a section: what each returns and adds to gradients, and the graph that it runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import fx

from ...ir.types import TensorType
from ..graph.autodiff.subgraphs import (
    PieceNodes,
    Subgraph,
    SubgraphBuilder,
    fake_of,
    gradients_of,
    has_checks,
    is_dense,
    results,
)
from ..graph.layouts.cuts import unmerged
from ..graph.layouts.propagation.partition import Part
from ..graph.layouts.versions import Version
from ..lazy import Lazy
from ..method.node_memory import memory_of
from ..values.actor_state import StateTensor
from ..values.operators import is_random
from ..values.specs import ir_dtype

Gradients: TypeAlias = Sequence[tuple[StateTensor, Version]]


@dataclass(frozen=True)
class PartPlan:
    """A part, the versions that it returns, and the gradients that it accumulates.

    Without a part (None), the function computes nothing: it only accumulates gradients, if any.
    """

    part: Part | None
    returned: tuple[Version, ...]
    gradients: Gradients

    @property
    def is_needed(self) -> bool:
        return self.part is None or bool(self.returned or self.gradients or self.part.nodes)

    @property
    def versions(self) -> tuple[Version, ...]:
        """The inputs of the part's graph, in the graph's order."""
        if self.part is not None:
            return self.part.inputs
        return tuple(dict.fromkeys(version for _, version in self.gradients))

    def inputs(self, state: Collection[Version]) -> tuple[Version, ...]:
        """The inputs that are arguments of the part's function."""
        return tuple(version for version in self.versions if version not in state)

    def reads(self, state: Collection[Version]) -> tuple[Version, ...]:
        """The inputs that are state of the actor."""
        return tuple(version for version in self.versions if version in state)

    def graph_of(self, rank: int) -> int:
        """The index of a rank's graph; ranks of one index run the same piece."""
        return 0 if self.part is None else self.part.bodies.of_rank[rank]

    def piece(
        self, rank: int, state: Mapping[Version, StateTensor], owner: torch.nn.Module
    ) -> Subgraph:
        """The piece that a rank runs; its tensors are those of the first rank.

        Args:
            rank: the rank.
            state: the tensors of the state, by version.
            owner: the module that holds the constants that graphs refer to.
        """
        reads, inputs = self.reads(state), self.inputs(state)
        if self.part is not None:
            graph = self.part.bodies.at(rank)
            placeholders = graph.find_nodes(op="placeholder")
            node_of = dict(zip(self.versions, placeholders, strict=True))
            output_of = dict(zip(self.part.outputs, results(graph), strict=True))
            nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        else:
            node_of = output_of = {version: version.node for version in inputs}
            nodes = []
        taken = [node_of[version] for version in (*reads, *inputs)]
        returned = [output_of[version] for version in self.returned]
        graded = [(tensor, output_of[version]) for tensor, version in self.gradients]
        builder = SubgraphBuilder({n.name: n.meta["loc"] for n in nodes if "loc" in n.meta})
        for node in taken:
            builder.placeholder(node)
        for node in nodes:
            builder.copy(node)
        memory = {memory_of(node) for node in taken}
        values = _apart(builder, returned, memory)
        builder.graph.output((*values, *(builder.of(node) for _, node in graded)))
        return Subgraph(
            nodes=Lazy.known(PieceNodes(builder.graph, owner, builder.locations)),
            reads=tuple(state[version] for version in reads),
            takes=tuple(map(type_of_version, inputs)),
            dense=(True,) * len(inputs),
            gives=tuple(map(type_of_version, self.returned)),
            rebinds=(),
            gradients=gradients_of(graded, returned, memory),
            aliases=(),
            draws=any(is_random(node.target, node.args, node.kwargs) for node in nodes),
            checks=has_checks(builder.graph),
        )


def _apart(
    builder: SubgraphBuilder, returned: Sequence[fx.Node], memory: Collection[int | None]
) -> Iterator[fx.Node]:
    """Values that are returned: contiguous, in memory of their own.

    Args:
        builder: has copied the values.
        returned: the values.
        memory: memory of what the piece takes.
    """
    used = set(memory)
    for node in returned:
        if is_dense(node) and node.op == "call_function" and memory_of(node) not in used:
            used.add(memory_of(node))
            yield builder.of(node)
        else:
            yield builder.clone(node, dense=True)


def type_of_version(version: Version) -> TensorType:
    """The type of a version, without a place. A product of cut factors has a dimension for each."""
    fake = fake_of(version.node)
    layout, shape = unmerged(version.layout, tuple(fake.shape))
    return TensorType(ir_dtype(fake.dtype), shape, None, layout if layout.axes else None)
