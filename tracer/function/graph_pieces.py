"""Cut graphs into pieces and make their bodies; calls with the same graph share the work."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from ...ir.flops import Flops
from ..graph.autodiff.partition import Split, forward_piece, split
from ..graph.autodiff.recomputation import Recompute
from ..graph.autodiff.subgraphs import Subgraph, piece_on
from ..graph.codegen.bodies import GraphBody
from ..graph.codegen.codegen import GeneratedSource, make_body, source_of
from ..method.joint import Joint
from ..method.purity.flops import count_flops
from ..values.actor_state import StateTensor
from ..values.group import Group
from ..values.interface import Bodies, RankBodies


@dataclass(eq=False)
class GraphPieces:
    """Caches the pieces, operation counts and sources of the graphs of a step's methods."""

    _forwards: dict[fx.Graph, tuple[Joint, Subgraph]] = field(default_factory=dict)
    _splits: dict[tuple[fx.Graph, Collection[int], Recompute], tuple[Joint, Split]] = field(
        default_factory=dict
    )
    _flops: dict[fx.Graph, Flops] = field(default_factory=dict)
    _sources: dict[fx.Graph, Callable[[], GeneratedSource]] = field(default_factory=dict)

    def forward(self, joint: Joint) -> Subgraph:
        """The piece of the forward alone, without a derivative."""
        if joint.graph not in self._forwards:
            self._forwards[joint.graph] = joint, forward_piece(joint)
        first, piece = self._forwards[joint.graph]
        return _moved(piece, first, joint)

    def split(self, joint: Joint, volatile: frozenset[int], what: Recompute) -> Split:
        """The forward, the backward and its halves; takes the arguments of `partition.split`."""
        key = joint.graph, volatile, what
        if key not in self._splits:
            self._splits[key] = joint, split(joint, volatile, what)
        first, parts = self._splits[key]
        halves = parts.halves
        if halves is not None:
            early = None if halves.input is None else _moved(halves.input, first, joint)
            halves = replace(halves, input=early, weight=_moved(halves.weight, first, joint))
        return replace(
            parts,
            forward=_moved(parts.forward, first, joint),
            backward=_moved(parts.backward, first, joint),
            halves=halves,
        )

    def flops(self, piece: Subgraph) -> Flops:
        """The floating-point operations of one run of a piece."""
        if piece.graph not in self._flops:
            self._flops[piece.graph] = count_flops(piece.graph)
        return self._flops[piece.graph]

    def bodies(self, piece: Subgraph, name: str, group: Group | None) -> Bodies:
        """The bodies of a piece, one for each rank that this process plays."""
        actor = None if group is None else group.actor
        if actor is None or len(actor.instances) == 1:
            return self._body(piece, name)
        return RankBodies(
            {
                rank: self._body(piece_on(piece, actor.state(rank).tensors), name)
                for rank in actor.instances
            }
        )

    def _body(self, piece: Subgraph, name: str) -> GraphBody:
        if piece.graph not in self._sources:
            self._sources[piece.graph] = source_of(piece)
        return make_body(piece, name, self._sources[piece.graph])


def _moved(piece: Subgraph, first: Joint, joint: Joint) -> Subgraph:
    """The piece with the state of `joint`, which has the same graph as `first`."""
    if first is joint:
        return piece
    tensors = {id(a): b for (_, a), (_, b) in zip(first.state, joint.state, strict=True)}
    slots = {
        id(a.slot): b.slot for (a, _), (b, _) in zip(first.rebinds, joint.rebinds, strict=True)
    }

    def each(state: Sequence[StateTensor]) -> tuple[StateTensor, ...]:
        return tuple(tensors[id(tensor)] for tensor in state)

    graded = each([gradient.tensor for gradient in piece.gradients])
    return replace(
        piece,
        state=each(piece.state),
        rebinds=tuple(slots[id(slot)] for slot in piece.rebinds),
        gradients=tuple(replace(g, tensor=t) for g, t in zip(piece.gradients, graded, strict=True)),
    )
