"""Functions of ranks that compute all of a call: one graph for each section, and its body.

Calls with the same graph share the work, whichever actors they call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ...ir.attributes import Effect, Shares
from ...ir.ops.module import Function
from ..graph.autodiff.partition import Sections, forward_piece, split
from ..graph.autodiff.recomputation import Recomputation, Recompute
from ..graph.autodiff.subgraphs import PieceNodes, Subgraph
from ..graph.codegen.codegen import make_body
from ..graph.codegen.version_counters import with_versions
from ..lazy import Lazy
from ..method.joint_graph import Joint, JointNodes
from ..method.stored.plain_text import Damaged, Json, NotStorable
from ..values.gradient_buckets import GradientLayout, whole_gradients
from ..values.interface import RankBodies, TracedPart, TracedVjp, Write
from .call_functions import CallFunctions
from .kept_pieces import (
    KnownPiece,
    PieceFacts,
    moved_piece,
    read_forward,
    read_sections,
    sections_json,
)
from .prepared_calls import preparing, taking


@dataclass(eq=False)
class GraphPieces:
    """Caches the pieces of the graphs of a step's methods, and what is known of each."""

    _forwards: dict[Lazy[JointNodes], tuple[Joint, Subgraph]] = field(default_factory=dict)
    _splits: dict[
        tuple[Lazy[JointNodes], frozenset[int], Recomputation], tuple[Joint, Sections[Subgraph]]
    ] = field(default_factory=dict)
    _facts: dict[Lazy[PieceNodes], PieceFacts] = field(default_factory=dict)

    def forward(self, joint: Joint) -> Subgraph:
        """The piece of the forward alone, without a derivative."""
        if joint.nodes not in self._forwards:
            self._forwards[joint.nodes] = joint, self._kept_forward(joint) or forward_piece(joint)
        first, piece = self._forwards[joint.nodes]
        return moved_piece(piece, first, joint)

    def sections(
        self, joint: Joint, volatile: frozenset[int], recomputation: Recomputation
    ) -> Sections[Subgraph]:
        """The forward, the backward and its halves; takes the arguments of `partition.split`."""
        key = joint.nodes, volatile, recomputation
        if key not in self._splits:
            is_plain = recomputation is Recompute.NOTHING
            kept = self._kept_sections(joint, volatile) if is_plain else None
            self._splits[key] = joint, kept or split(joint, volatile, recomputation)
        first, sections = self._splits[key]
        return sections.changed(lambda piece: moved_piece(piece, first, joint))

    def facts(self, piece: Subgraph) -> PieceFacts:
        """The counts and sources of a piece."""
        if piece.nodes not in self._facts:
            self._facts[piece.nodes] = PieceFacts.of(piece)
        return self._facts[piece.nodes]

    def json(self, joint: Joint) -> Json:
        """The JSON of the pieces that a joint graph was cut into, for another start.

        Pieces that have no text are left out: the next start cuts them again.
        """
        content: dict[str, Any] = {"forward": None, "sections": []}
        first, forward = self._forwards.get(joint.nodes, (joint, None))
        if forward is not None:
            with suppress(NotStorable):
                content["forward"] = self.facts(forward).json(forward, first)
        for (nodes, volatile, again), (first, sections) in list(self._splits.items()):
            if nodes is joint.nodes and again is Recompute.NOTHING:
                with suppress(NotStorable):
                    parts = sections_json(first, sections, self.facts)
                    content["sections"].append([sorted(volatile), parts])
        return content

    def _kept_forward(self, joint: Joint) -> Subgraph | None:
        """The forward alone of an earlier start; None if there is none."""
        try:
            content = None if joint.kept is None else joint.kept.pieces.value["forward"]
            return None if content is None else self._note(read_forward(content, joint))
        except (Damaged, TypeError, ValueError, KeyError) as error:
            _mend(joint, error)
            return None

    def _kept_sections(self, joint: Joint, volatile: frozenset[int]) -> Sections[Subgraph] | None:
        """The sections of an earlier start; None if there are none."""
        try:
            contents = [] if joint.kept is None else joint.kept.pieces.value["sections"]
            for numbers, content in contents:
                if frozenset(numbers) == volatile:
                    return read_sections(content, joint, volatile, self._note)
            return None
        except (Damaged, TypeError, ValueError, KeyError) as error:
            _mend(joint, error)
            return None

    def _note(self, known: KnownPiece) -> Subgraph:
        piece, self._facts[piece.nodes] = known
        return piece


def _mend(joint: Joint, error: Exception) -> None:
    """Say that pieces are cut out of the graph, since those of an earlier start are damaged."""
    assert joint.kept is not None, "pieces of an earlier start were read"
    joint.kept.mend(f"a piece is damaged: {error}")


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
        facts = self.pieces.facts(section)
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
            flops=facts.flops.value,
            workspace=facts.workspace.value,
            offloads=section.offloads,
            checks=section.checks,
        )
        actor = None if self.target.group is None else self.target.group.actor
        if actor is None or len(actor.instances) == 1:
            return TracedPart(function, make_body(section, name, facts.sources))
        pieces = {rank: section.on_tensors(actor.state(rank).tensors) for rank in actor.instances}
        bodies = {rank: make_body(piece, name, facts.sources) for rank, piece in pieces.items()}
        return TracedPart(function, RankBodies(bodies))

    def gradients(self, backward: Subgraph) -> Mapping[str, GradientLayout]:
        return {} if self.target.group is None else whole_gradients(backward.graded)

    def noticing(
        self, derivative: TracedVjp, backward: Subgraph, writes: Sequence[Write]
    ) -> TracedVjp:
        saved = len(derivative.first.declaration.outputs) - len(self.joint.results.types())
        return with_versions(derivative, backward.reads, saved, self.call.shown, writes)
