"""The sections of graphs that ranks compute in pieces, and the graphs of their parts.

Calls whose graphs are cut alike share the work, whichever actors they call.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from torch import fx

from ...ir.layout import Layout
from ...ir.types import Place
from ..graph.autodiff.partition import Sections
from ..graph.autodiff.recomputation import Recomputation
from ..graph.autodiff.subgraphs import Subgraph
from ..graph.layouts.propagation.joints import propagate_joint
from ..graph.layouts.propagation.partition import Partition
from ..graph.layouts.propagation.sections import LaidOutSection, SectionCutter
from ..graph.layouts.versions import Version
from ..lazy import Lazy
from ..method.joint_graph import Joint, JointNodes
from ..values.actor_state import StateTensor
from .kept_pieces import PieceFacts, moved_piece
from .part_plans import PartPlan


@dataclass(frozen=True)
class LayoutPlan:
    """Says how a joint graph is laid out and cut.

    Attributes:
        place: the ranks that call it.
        ranks: the ranks whose graphs are made.
        inputs: the layouts of its inputs; None: copies.
        state: the layouts of parameters and buffers, by path.
        gathered: the layouts of stored parameters where they are used, and their layers, by path.
        fetched: the layer of each parameter that is fetched from the host, by path; None for one
            that no part begins with.
        attention, sequence: as `propagate` takes them.
    """

    place: Place
    ranks: tuple[int, ...]
    inputs: tuple[Layout | None, ...]
    state: tuple[tuple[str, Layout], ...]
    gathered: tuple[tuple[str, Layout, str], ...]
    fetched: tuple[tuple[str, str | None], ...]
    attention: str | None
    sequence: tuple[str, ...]

    def by_position(self, paths: Sequence[str]) -> Hashable:
        """The plan, with what it says of the state at some paths, one by one, without the paths.

        Two equal layers of a model have other paths, and are laid out and cut alike.
        """
        state, fetched = dict(self.state), dict(self.fetched)
        gathered = {path: (layout, layer) for path, layout, layer in self.gathered}
        numbers: dict[str | None, int] = {None: 0}

        def number(layer: str | None) -> int:
            return numbers.setdefault(layer, len(numbers))

        def facts(path: str) -> Hashable:
            layout, layer = gathered.get(path, (None, None))
            fetched_layer = number(fetched[path]) if path in fetched else None
            return state.get(path), layout, number(layer), fetched_layer

        rest = self.place, self.ranks, self.inputs, self.attention, self.sequence
        return (*rest, *map(facts, paths))

    def cutter(self, joint: Joint) -> SectionCutter:
        """Lay a joint graph out.

        Raises:
            LayoutError: an op has no rule, or layouts contradict each other.
        """
        gathered = {path: layout for path, layout, _ in self.gathered}
        propagation = propagate_joint(
            *(joint, self.place, dict(self.state), self.inputs),
            pins={n: gathered[state.path] for n, state in joint.state if state.path in gathered},
            attention=self.attention,
            sequence=self.sequence,
        )
        layers = {path: layer for path, _, layer in self.gathered}
        return SectionCutter(joint, propagation, self.ranks, layers, dict(self.fetched))


_Graph: TypeAlias = tuple[Lazy[JointNodes], Hashable]
"""A joint graph that is laid out: its nodes, and its plan by position."""


@dataclass(eq=False)
class LaidOutPieces:
    """Caches the sections of graphs that are laid out, and the graphs of their parts.

    The tensors of a cached value are those of the call that it was made for; `_moved` gives those
    of another call.
    """

    _cutters: dict[_Graph, tuple[Joint, SectionCutter]] = field(default_factory=dict)
    _forwards: dict[_Graph, LaidOutSection] = field(default_factory=dict)
    _sections: dict[
        tuple[_Graph, tuple[int | None, ...], frozenset[int], Recomputation],
        Sections[LaidOutSection],
    ] = field(default_factory=dict)
    _parts: dict[
        tuple[Partition, int, int, tuple[Version, ...], tuple[fx.Node, ...]],
        tuple[Joint, Subgraph, PieceFacts],
    ] = field(default_factory=dict)

    def gradients(self, joint: Joint, plan: LayoutPlan) -> Sequence[tuple[StateTensor, Version]]:
        """The gradients of the state, in the order in which the backward computes them.

        Raises:
            LayoutError: as in `LayoutPlan.cutter`.
        """
        first, cutter = self._cutter(joint, plan)
        tensor_of = _tensor_of(first, joint)
        return [(tensor_of[id(tensor)], version) for tensor, version in cutter.gradients]

    def forward(self, joint: Joint, plan: LayoutPlan) -> LaidOutSection:
        """The section of the forward alone, without a derivative.

        Raises:
            LayoutError: as in `LayoutPlan.cutter`.
        """
        first, cutter = self._cutter(joint, plan)
        graph = _graph_of(joint, plan)
        if graph not in self._forwards:
            self._forwards[graph] = cutter.forward()
        return _moved(self._forwards[graph], first, joint)

    def sections(
        self,
        joint: Joint,
        plan: LayoutPlan,
        buckets: Mapping[str, int],
        volatile: frozenset[int],
        recomputation: Recomputation,
    ) -> Sections[LaidOutSection]:
        """The forward, the backward and its halves.

        Args:
            joint: the joint graph.
            plan: how it is laid out.
            buckets: the buckets of the gradients that are reduced, by path.
            volatile, recomputation: as `partition.split` takes them.

        Raises:
            LayoutError: as in `LayoutPlan.cutter`.
        """
        first, cutter = self._cutter(joint, plan)
        graph = _graph_of(joint, plan)
        known = [buckets.get(tensor.path) for tensor, _ in self.gradients(joint, plan)]
        numbers = tuple(known.index(bucket) if bucket is not None else None for bucket in known)
        key = graph, numbers, volatile, recomputation
        if key not in self._sections:
            path_of = _path_of(joint, first)
            cutter.buckets = {path_of[p]: bucket for p, bucket in buckets.items() if p in path_of}
            self._sections[key] = cutter.sections(volatile, recomputation)
        return self._sections[key].changed(lambda section: _moved(section, first, joint))

    def part(
        self, section: LaidOutSection, index: int, plan: PartPlan, rank: int, joint: Joint
    ) -> tuple[Subgraph, PieceFacts]:
        """The piece that a rank runs for a part, with its counts and sources.

        Its tensors are those of the first rank, so `Subgraph.on_tensors` has to put the rank's own
        in their place.

        Args:
            section: the section.
            index: the number of the part.
            plan: the part.
            rank: the rank.
            joint: the joint graph of the section.
        """
        graded = tuple(version.node for _, version in plan.gradients)
        key = section.partition, index, plan.graph_of(rank), plan.returned, graded
        if key not in self._parts:
            piece = plan.piece(rank, section.in_place, joint.owner)
            self._parts[key] = joint, piece, PieceFacts.of(piece)
        first, piece, facts = self._parts[key]
        return moved_piece(piece, first, joint), facts

    def _cutter(self, joint: Joint, plan: LayoutPlan) -> tuple[Joint, SectionCutter]:
        graph = _graph_of(joint, plan)
        if graph not in self._cutters:
            self._cutters[graph] = joint, plan.cutter(joint)
        return self._cutters[graph]


def _graph_of(joint: Joint, plan: LayoutPlan) -> _Graph:
    return joint.nodes, plan.by_position(_paths(joint))


def _paths(joint: Joint) -> list[str]:
    """The paths of the state, each tensor's followed by those of what it is computed from."""
    return [held.path for tensor in joint.tensors for held in (tensor, *tensor.sources)]


def _path_of(first: Joint, joint: Joint) -> dict[str, str]:
    """The path in `joint` for each path in `first`, which has the same graph."""
    return dict(zip(_paths(first), _paths(joint), strict=True))


def _tensor_of(first: Joint, joint: Joint) -> dict[int, StateTensor]:
    """The tensor of `joint` for each tensor of `first`, which has the same graph, by its id."""
    return {id(a): b for a, b in zip(first.tensors, joint.tensors, strict=True)}


def _moved(section: LaidOutSection, first: Joint, joint: Joint) -> LaidOutSection:
    """The section with the state of `joint`, which has the same graph as `first`."""
    if first is joint:
        return section
    tensor_of, path_of = _tensor_of(first, joint), _path_of(first, joint)
    return replace(
        section,
        resting=frozenset(path_of[path] for path in section.resting if path in path_of),
        gradients=tuple((tensor_of[id(tensor)], version) for tensor, version in section.gradients),
        state={version: tensor_of[id(tensor)] for version, tensor in section.state.items()},
    )
