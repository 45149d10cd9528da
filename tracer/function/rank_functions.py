"""Functions of ranks that compute all of a call: one graph for each section, and its body.

Calls with the same graph share the work, whichever actors they call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from ...ir.attributes import Effect, Shares
from ...ir.flops import Flops
from ...ir.ops.module import Function
from ..graph.autodiff.partition import Sections, forward_piece, split
from ..graph.autodiff.recomputation import Recomputation
from ..graph.autodiff.subgraphs import Subgraph
from ..graph.codegen.codegen import GeneratedSource, make_body, source_of
from ..graph.codegen.version_counters import with_versions
from ..graph.codegen.workspace import workspace_of
from ..method.joint import Joint
from ..method.purity.flops import count_flops
from ..values.gradient_buckets import GradientLayout, whole_gradients
from ..values.interface import RankBodies, TracedPart, TracedVjp, Write
from .call_functions import CallFunctions
from .prepared_calls import preparing, taking


@dataclass(eq=False)
class GraphPieces:
    """Caches the pieces, operation counts and sources of the graphs of a step's methods."""

    _forwards: dict[fx.Graph, tuple[Joint, Subgraph]] = field(default_factory=dict)
    _splits: dict[
        tuple[fx.Graph, Collection[int], Recomputation], tuple[Joint, Sections[Subgraph]]
    ] = field(default_factory=dict)
    _flops: dict[fx.Graph, Flops] = field(default_factory=dict)
    _workspaces: dict[fx.Graph, int] = field(default_factory=dict)
    _sources: dict[fx.Graph, Callable[[], GeneratedSource]] = field(default_factory=dict)

    def forward(self, joint: Joint) -> Subgraph:
        """The piece of the forward alone, without a derivative."""
        if joint.graph not in self._forwards:
            self._forwards[joint.graph] = joint, forward_piece(joint)
        first, piece = self._forwards[joint.graph]
        return _moved(piece, first, joint)

    def sections(
        self, joint: Joint, volatile: frozenset[int], recomputation: Recomputation
    ) -> Sections[Subgraph]:
        """The forward, the backward and its halves; takes the arguments of `partition.split`."""
        key = joint.graph, volatile, recomputation
        if key not in self._splits:
            self._splits[key] = joint, split(joint, volatile, recomputation)
        first, sections = self._splits[key]
        return sections.changed(lambda piece: _moved(piece, first, joint))

    def flops(self, piece: Subgraph) -> Flops:
        """The floating-point operations of one run of a piece."""
        if piece.graph not in self._flops:
            self._flops[piece.graph] = count_flops(piece.graph)
        return self._flops[piece.graph]

    def workspace(self, piece: Subgraph) -> int:
        """The bytes that one run of a piece holds beside its operands and results."""
        if piece.graph not in self._workspaces:
            self._workspaces[piece.graph] = workspace_of(piece)
        return self._workspaces[piece.graph]

    def source(self, piece: Subgraph) -> Callable[[], GeneratedSource]:
        """Gives the source of a piece's body."""
        if piece.graph not in self._sources:
            self._sources[piece.graph] = source_of(piece)
        return self._sources[piece.graph]


def _moved(piece: Subgraph, first: Joint, joint: Joint) -> Subgraph:
    """The piece with the state of `joint`, which has the same graph as `first`."""
    if first is joint:
        return piece
    tensors = {id(a): b for (_, a), (_, b) in zip(first.state, joint.state, strict=True)}
    slots = {
        id(a.slot): b.slot for (a, _), (b, _) in zip(first.rebinds, joint.rebinds, strict=True)
    }
    return piece.on(lambda tensor: tensors[id(tensor)], lambda slot: slots[id(slot)])


@dataclass(frozen=True)
class RankFunctions(CallFunctions[Subgraph]):
    """Makes the functions of a call of which each rank computes all.

    Attributes:
        pieces: the pieces of the step's graphs.
    """

    pieces: GraphPieces

    def forward(self) -> Subgraph:
        return self.pieces.forward(self.joint)

    def sections(
        self, volatile: frozenset[int], recomputation: Recomputation
    ) -> Sections[Subgraph]:
        return self.pieces.sections(self.joint, volatile, recomputation)

    def part(self, section: Subgraph, name: str, effect: Effect, shares: Shares) -> TracedPart:
        if self.weights is None or not any(tensor.sources for tensor in section.reads):
            return self._part(section, name, effect, shares)
        section, prepared = taking(section, self.weights)
        part = self._part(section, f"{name}.in_float8", effect, shares)
        return preparing(part, prepared, self.weights, name)

    def _part(self, section: Subgraph, name: str, effect: Effect, shares: Shares) -> TracedPart:
        function = Function(
            name,
            section.takes,
            section.gives,
            effect=effect,
            shares=shares,
            actor=self.target.actor,
            random=section.draws,
            aliases=section.aliases,
            loc=self.call.declared_at,
            flops=self.pieces.flops(section),
            workspace=self.pieces.workspace(section),
            offloads=section.offloads,
            checks=section.checks,
        )
        source = self.pieces.source(section)
        actor = None if self.target.group is None else self.target.group.actor
        if actor is None or len(actor.instances) == 1:
            return TracedPart(function, make_body(section, name, source))
        pieces = {rank: section.on_tensors(actor.state(rank).tensors) for rank in actor.instances}
        bodies = {rank: make_body(piece, name, source) for rank, piece in pieces.items()}
        return TracedPart(function, RankBodies(bodies))

    def gradients(self, backward: Subgraph) -> Mapping[str, GradientLayout]:
        return {} if self.target.group is None else whole_gradients(backward.graded)

    def noticing(
        self, derivative: TracedVjp, backward: Subgraph, writes: Sequence[Write]
    ) -> TracedVjp:
        saved = len(derivative.first.declaration.outputs) - len(self.joint.outputs)
        return with_versions(derivative, backward.reads, saved, self.call.shown, writes)
