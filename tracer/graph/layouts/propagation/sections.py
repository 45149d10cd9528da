"""Cut a joint graph that has layouts into forward, backward and its halves, each in parts.

Which node belongs to which section is decided as for a graph without layouts (`autodiff`). Values
go from section to section as versions, in one of their layouts. The backward takes what the forward
has exchanged, and does not exchange it again. Only two kinds of values travel again, since a rank
that kept them would hold the whole tensor: blocks of a ring, and tokens gathered for a weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from ....lazy import Lazy
from ....method.joint_graph import Joint
from ....values.actor_state import StateTensor
from ...autodiff.backward_cut import BackwardCut
from ...autodiff.partition import Sections
from ...autodiff.recomputation import Recomputation, Recompute, recomputed
from ...autodiff.split_backward import sides
from ...autodiff.subgraphs import written_in_place
from ..cases import LayoutError
from ..cuts import CutProduct
from ..versions import Propagation, Version, text_of
from .partition import Partition, exchanged, partition


@dataclass(frozen=True)
class LaidOutSection:
    """A forward, a backward, or a half of one.

    Attributes:
        takes, gives: its inputs and outputs.
        gradients: the gradients that it adds to `.grad` of the state.
        partition: its parts, and the transfers between them.
        state: the tensors of the state, and those that are computed from them, by their versions.
        resting: the paths of those that rest on the host.
    """

    takes: tuple[Version, ...]
    gives: tuple[Version, ...]
    gradients: tuple[tuple[StateTensor, Version], ...]
    partition: Partition
    state: dict[Version, StateTensor]
    resting: frozenset[str]

    @property
    def reads(self) -> tuple[StateTensor, ...]:
        """The tensors that a part reads, or that are gathered for one."""
        read = {version for part in self.partition.parts for version in part.inputs}
        for transfers in self.partition.gathers.values():
            read.update(transfer.before for transfer in transfers)
        tensors = [tensor for version, tensor in self.state.items() if version in read]
        return tuple(dict.fromkeys(held for tensor in tensors for held in tensor.held))

    @property
    def in_place(self) -> dict[Version, StateTensor]:
        """The tensors that parts read where they live; others are computed or fetched first."""
        return {
            version: tensor
            for version, tensor in self.state.items()
            if not tensor.sources and tensor.path not in self.resting
        }

    @property
    def graded(self) -> tuple[StateTensor, ...]:
        """The tensors to whose `.grad` it adds."""
        return tuple(tensor for tensor, _ in self.gradients)


def relabelled(joint: Joint, propagation: Propagation) -> Joint:
    """The joint graph with nodes of the graph that has layouts."""
    of = propagation.copies
    forward: set[str] = set()
    behind = {of[n] for n in joint.graph.nodes if n in of and n.name not in joint.forward}
    for node in propagation.graph.nodes:
        if node in behind and node.op == "call_function":
            break
        forward.add(node.name)
    if not joint.cotangents:
        forward.update(node.name for node in propagation.graph.nodes)
    ends = iter(propagation.outputs)

    def end(node: fx.Node) -> fx.Node:
        version = next(ends)  # of the node's copy, or of a further copy in another layout
        return of[node] if version is None else version.node

    nodes = joint.nodes.value.on(propagation.graph, frozenset(forward), of.__getitem__, end)
    return replace(joint, nodes=Lazy.known(nodes))


class SectionCutter:
    """Cuts one joint graph.

    Args:
        joint: the graph before it was laid out.
        propagation: its layouts.
        ranks: the ranks whose graphs are made.
        stored: the layer of each parameter that is gathered for its use, by path.
        resting: the layer of each that is fetched from the host for its use, by path; None for one
            that no part begins with.

    Attributes:
        buckets: the bucket of each gradient of state, by path; a backward is cut behind the last
            gradient of a bucket.
    """

    def __init__(
        self,
        joint: Joint,
        propagation: Propagation,
        ranks: Collection[int],
        stored: Mapping[str, str],
        resting: Mapping[str, str | None] | None = None,
    ) -> None:
        self.joint = relabelled(joint, propagation)
        self._propagation = propagation
        self._ranks = ranks
        ends = iter(propagation.outputs)
        self._outputs = _versions(next(ends) for _ in joint.outputs)
        self._refuse_products()
        self._input_grads = _versions(next(ends) for _ in joint.input_grads)
        # Outputs behind these belong to ops that write to state in secret.
        state_grads = _versions(next(ends) for _ in joint.state_grads)
        gradients = zip(joint.state_grads, state_grads, strict=True)
        self._gradients = tuple((tensor, version) for (tensor, _), version in gradients)
        self._forward = [n for n in propagation.graph.nodes if n.name in self.joint.forward]
        self._state = dict(self.joint.state)
        self._stored = {n: stored[t.path] for n, t in self._state.items() if t.path in stored}
        self._resting = frozenset(resting or ())
        layers = {n: (resting or {}).get(t.path) for n, t in self._state.items()}
        self._opening = {n: layer for n, layer in layers.items() if layer is not None}
        self.buckets: Mapping[str, int] = {}

    @property
    def gradients(self) -> list[tuple[StateTensor, Version]]:
        """The gradients of the state, in the order in which the backward computes them."""
        order = {node: index for index, node in enumerate(self._propagation.graph.nodes)}
        return sorted(self._gradients, key=lambda pair: order[pair[1].node])

    def _refuse_products(self) -> None:
        """Refuse outputs with a dimension that is a product of cut factors: no type has it."""
        for version in self._outputs:
            if any(isinstance(cut, CutProduct) for cut in version.layout.cuts):
                raise LayoutError(
                    f"{text_of(version)} is an output, and a dimension of it is cut as several "
                    "factors of it are, which no type says",
                    loc=self._propagation.locations.get(version.node),
                    remedy="return it without viewing two cut dimensions as one",
                )

    def forward(self, saved: Sequence[Version] = ()) -> LaidOutSection:
        """The forward, with the saved values behind its outputs."""
        takes = tuple(Version(node, self._propagation.layout(node)) for node in self.joint.inputs)
        return self._section(self._forward, takes, (*self._outputs, *saved), (), (), self._state)

    def sections(
        self, volatile: Collection[int], recomputation: Recomputation
    ) -> Sections[LaidOutSection]:
        """All sections; the arguments are those of `recomputed`."""
        joint = self.joint
        cut = BackwardCut(joint, volatile, recomputed(joint, volatile, recomputation))
        changing = {joint.nodes.value.state[index] for index in volatile}
        state = {node: tensor for node, tensor in self._state.items() if node not in changing}
        exchanged_versions = self._exchanged(self._forward, self._outputs, self._state)
        # Neither gathered state nor gathered tokens are kept for the backward.
        again = self._propagation.passing
        transferred = (
            [v for v in exchanged_versions if v.node not in state and v not in again]
            if recomputation is not Recompute.ALL
            else ()
        )
        layout = self._propagation.layout
        cotangents = tuple(Version(node, layout(node)) for node in joint.cotangents)
        inputs = self._inputs(cut, cut.body, self._input_grads, self._gradients, transferred, state)
        saved = tuple(v for v in inputs if v not in cotangents)
        takes = (*saved, *cotangents)
        backward = self._section(
            self._with_views(cut, cut.body),
            takes,
            self._input_grads,
            self._gradients,
            transferred,
            state,
        )
        whole = Sections(self.forward(saved), backward)
        return self._halved(whole, cut, transferred, state)

    def _halved(
        self,
        whole: Sections[LaidOutSection],
        cut: BackwardCut,
        transferred: Collection[Version],
        state: dict[fx.Node, StateTensor],
    ) -> Sections[LaidOutSection]:
        """The sections, with the halves of the backward if a part of it can be put off."""
        takes = whole.backward.takes
        if not self._input_grads:
            kept_indices = tuple(range(len(takes)))
            return (
                replace(whole, weight=whole.backward, kept=kept_indices)
                if self._gradients
                else whole
            )
        halves = sides(self.joint, cut)
        if halves is None or halves[0] & halves[1]:
            return whole
        first, second = ([n for n in cut.body if n in side] for side in halves)
        early = tuple((t, v) for t, v in self._gradients if v.node not in halves[1])
        late = tuple((t, v) for t, v in self._gradients if v.node in halves[1])
        results = [*self._input_grads, *(version for _, version in early)]
        early_transferred = {
            *transferred,
            *self._exchanged(self._with_views(cut, first), results, state),
        }
        inputs = self._inputs(cut, second, (), late, early_transferred, state)
        left = tuple(version for version in inputs if version not in takes)
        kept_indices = tuple(i for i, version in enumerate(takes) if version in inputs)
        weight_takes = (*(takes[i] for i in kept_indices), *left)
        input_nodes, weight_nodes = self._with_views(cut, first), self._with_views(cut, second)
        return replace(
            whole,
            input=self._section(
                input_nodes, takes, (*self._input_grads, *left), early, transferred, state
            ),
            weight=self._section(weight_nodes, weight_takes, (), late, early_transferred, state),
            kept=kept_indices,
        )

    def _with_views(self, cut: BackwardCut, nodes: Sequence[fx.Node]) -> set[fx.Node]:
        """Nodes of the backward, with the views of saved values that it takes again."""
        all_nodes = set(nodes)
        sources = [s for node in nodes for s in node.all_input_nodes]
        for node in (*sources, *cut.results()):
            while node not in all_nodes and (base := _viewed(cut, node)) is not None:
                all_nodes.add(node)
                node = base
        return all_nodes

    def _inputs(
        self,
        cut: BackwardCut,
        nodes: Sequence[fx.Node],
        gives: Sequence[Version],
        gradients: Sequence[tuple[StateTensor, Version]],
        transferred: Collection[Version],
        state: dict[fx.Node, StateTensor],
    ) -> tuple[Version, ...]:
        """The versions that some nodes of the backward take from elsewhere."""
        outputs = [*gives, *(version for _, version in gradients)]
        chosen = self._with_views(cut, nodes)
        return partition(
            *(self._propagation, chosen, outputs, transferred, state, (), self._stored),
            resting=self._opening,
        ).inputs

    def _exchanged(
        self,
        nodes: Collection[fx.Node],
        outputs: Sequence[Version],
        state: Collection[fx.Node],
    ) -> frozenset[Version]:
        """The values that ranks exchange and a backward takes, but for those that pass by."""
        versions = exchanged(self._propagation, nodes, outputs, state, self._stored, self._opening)
        return frozenset(v for v in versions if not any(cut.shift for cut in v.layout.cuts))

    def _section(
        self,
        nodes: Collection[fx.Node],
        takes: tuple[Version, ...],
        gives: tuple[Version, ...],
        gradients: tuple[tuple[StateTensor, Version], ...],
        transferred: Collection[Version],
        state: dict[fx.Node, StateTensor],
    ) -> LaidOutSection:
        outputs = [*gives, *(version for _, version in gradients)]
        buckets = {v.node: self.buckets[t.path] for t, v in gradients if t.path in self.buckets}
        parts = partition(
            self._propagation,
            nodes,
            outputs,
            transferred,
            state,
            self._ranks,
            self._stored,
            buckets,
            self._opening,
        )
        missing = [version for version in parts.inputs if version not in takes]
        assert not missing, f"a section takes {missing} of nobody"
        held = {Version(n, self._propagation.layout(n)): tensor for n, tensor in state.items()}
        return LaidOutSection(takes, gives, gradients, parts, held, self._resting)


def _viewed(cut: BackwardCut, node: fx.Node) -> fx.Node | None:
    """The base of a view; None for another node, or where the view was written in place."""
    return None if written_in_place(node) is not None else cut.base(node)


def _versions(ends: Iterable[Version | None]) -> tuple[Version, ...]:
    versions = tuple(ends)
    return tuple(version for version in versions if version is not None)
