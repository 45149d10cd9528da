"""The pieces of a joint graph, with their code, as JSON: what the next start need not make again.

A piece that was read knows all that a step has to know of it. Its graph is cut when something asks
for it, such as a compiler of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from ...ir.flops import Flops
from ...ir.types import DType, TensorType, ValueType
from ..graph.autodiff.partition import Sections, forward_piece, split
from ..graph.autodiff.subgraphs import Gradient, Subgraph
from ..graph.codegen.codegen import sources_of
from ..graph.codegen.generated_source import BodySources, GeneratedSource
from ..graph.codegen.source_text import read_source, source_json
from ..graph.codegen.workspace import workspace_of
from ..lazy import Lazy
from ..method.joint_graph import Joint, Kept
from ..method.purity.flops import count_flops
from ..method.stored.plain_text import Damaged, Json, NotStorable
from ..values.actor_state import StateTensor

_DTYPES = {dtype.value: dtype for dtype in DType}


def moved_piece(piece: Subgraph, first: Joint, joint: Joint) -> Subgraph:
    """The piece with the state of `joint`, which has the same graph as `first`."""
    if first is joint:
        return piece
    tensors = {id(a): b for a, b in zip(first.tensors, joint.tensors, strict=True)}
    slots = {id(a.slot): b.slot for a, b in zip(first.rebound, joint.rebound, strict=True)}
    return piece.on(lambda tensor: tensors[id(tensor)], lambda slot: slots[id(slot)])


@dataclass(frozen=True)
class PieceFacts:
    """Counts and sources of a piece, whichever actor it is for.

    Attributes:
        flops: the floating-point operations of one run.
        workspace: the bytes that one run holds beside its operands and results.
        sources: its sources.
    """

    flops: Lazy[Flops]
    workspace: Lazy[int]
    sources: BodySources

    @staticmethod
    def of(piece: Subgraph) -> PieceFacts:
        """The facts of a piece that this process has cut; they are found when asked for."""
        flops = Lazy(lambda: count_flops(piece.graph))
        return PieceFacts(flops, Lazy(lambda: workspace_of(piece)), sources_of(piece))

    def json(self, piece: Subgraph, joint: Joint) -> Json:
        """The JSON of the piece, with the sources that were generated.

        A piece that has no actor's state has its source even if no rank of this process runs it:
        those that do find this text under the same key.

        Args:
            piece: the piece.
            joint: the joint graph that it was cut from.

        Raises:
            NotStorable: a type has no text.
        """
        if not joint.tensors and not self.sources.known:
            self.sources.plain()
        numbers = {id(tensor): i for i, tensor in enumerate(joint.tensors)}
        slots = [id(rebind.slot) for rebind in joint.rebound]
        gradients = [[numbers[id(g.tensor)], g.owned] for g in piece.gradients]
        return {
            "reads": [numbers[id(tensor)] for tensor in piece.reads],
            "takes": list(map(_type_json, piece.takes)),
            "dense": piece.dense,
            "gives": list(map(_type_json, piece.gives)),
            "rebinds": [slots.index(id(slot)) for slot in piece.rebinds],
            "gradients": gradients,
            "aliases": piece.aliases,
            "draws": piece.draws,
            "checks": piece.checks,
            "offloads": piece.offloads,
            "flops": [[dtype.value, count] for dtype, count in self.flops.value.counts],
            "workspace": self.workspace.value,
            "sources": dict(self._sources_json()),
        }

    def _sources_json(self) -> Iterator[tuple[str, Json]]:
        for kind, source in list(self.sources.known.items()):
            with suppress(NotStorable):  # the next start generates it
                yield kind, source_json(source)


@dataclass(frozen=True)
class KeptSources:
    """The sources of a piece that an earlier start has generated; implements `SourceStore`."""

    json: Json
    kept: Kept

    def read(
        self, kind: str, write: Callable[[frozenset[str]], GeneratedSource]
    ) -> GeneratedSource | None:
        return read_source(self.json.get(kind), self.kept.line_of, self.kept.mend, write)


KnownPiece = tuple[Subgraph, PieceFacts]


def read_piece(json: Json, joint: Joint, cut: Callable[[], Subgraph]) -> KnownPiece:
    """A piece of a joint graph of an earlier start, and what is known of it.

    Args:
        json: what `PieceFacts.json` has given.
        joint: the joint graph.
        cut: cuts the piece out of it.

    Raises:
        Damaged: it is no such JSON.
    """
    assert joint.kept is not None

    def tensor(number: int) -> StateTensor:
        return joint.tensors[number]

    try:
        piece = Subgraph(
            nodes=Lazy(lambda: cut().nodes.value),
            reads=tuple(map(tensor, json["reads"])),
            takes=tuple(map(_read_type, json["takes"])),
            dense=tuple(map(bool, json["dense"])),
            gives=tuple(map(_read_type, json["gives"])),
            rebinds=tuple(joint.rebound[i].slot for i in json["rebinds"]),
            gradients=tuple(Gradient(tensor(i), bool(owned)) for i, owned in json["gradients"]),
            aliases=tuple((int(a), int(b)) for a, b in json["aliases"]),
            draws=bool(json["draws"]),
            checks=bool(json["checks"]),
            offloads=tuple(map(int, json["offloads"])),
        )
        flops = Flops(tuple((_DTYPES[name], int(count)) for name, count in json["flops"]))
        workspace, sources = int(json["workspace"]), KeptSources(dict(json["sources"]), joint.kept)
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise Damaged(f"a piece: {error}") from error
    facts = PieceFacts(Lazy.known(flops), Lazy.known(workspace), sources_of(piece, sources))
    return piece, facts


def sections_json(
    joint: Joint, sections: Sections[Subgraph], facts: Callable[[Subgraph], PieceFacts]
) -> Json:
    """The JSON of the sections of a joint graph.

    Raises:
        NotStorable: as in `PieceFacts.json`.
    """
    halves = (sections.input, sections.weight)
    parts = (sections.forward, sections.backward)
    return {
        "parts": [facts(piece).json(piece, joint) for piece in parts],
        "halves": [
            None if piece is None or piece is sections.backward else facts(piece).json(piece, joint)
            for piece in halves
        ],
        "late": sections.weight is sections.backward,
        "kept": sections.kept,
    }


def read_sections(
    json: Json, joint: Joint, volatile: frozenset[int], note: Callable[[KnownPiece], Subgraph]
) -> Sections[Subgraph]:
    """The sections of a joint graph of an earlier start.

    Args:
        json: what `sections_json` has given.
        joint: the joint graph.
        volatile: as in `split`.
        note: takes a piece with what is known of it, and gives the piece.

    Raises:
        Damaged: it is no such JSON.
    """
    cut = Lazy(lambda: split(joint, volatile))

    def read(content: Json, which: Callable[[Sections[Subgraph]], Subgraph | None]) -> Subgraph:
        def piece() -> Subgraph:
            chosen = which(cut.value)
            assert chosen is not None, "the graph is cut as in the earlier start"
            return chosen

        return note(read_piece(content, joint, piece))

    try:
        forward, backward = json["parts"]
        early, late = json["halves"]
        is_late, kept = json["late"], tuple(map(int, json["kept"]))
    except (TypeError, ValueError, KeyError) as error:
        raise Damaged(f"sections: {error}") from error
    second = read(backward, lambda sections: sections.backward)
    return Sections(
        read(forward, lambda sections: sections.forward),
        second,
        None if early is None else read(early, lambda sections: sections.input),
        second if is_late else None if late is None else read(late, lambda s: s.weight),
        kept,
    )


def read_forward(json: Json, joint: Joint) -> KnownPiece:
    """The forward alone of a joint graph of an earlier start.

    Raises:
        Damaged: it is no JSON of one.
    """
    return read_piece(json, joint, lambda: forward_piece(joint))


def _type_json(type_: ValueType) -> Json:
    if not isinstance(type_, TensorType) or type_ != TensorType(type_.dtype, type_.shape):
        raise NotStorable(f"a value of type {type_} has no text")
    return [type_.dtype.value, type_.shape]


def _read_type(json: Json) -> TensorType:
    dtype, shape = json
    return TensorType(_DTYPES[dtype], tuple(map(int, shape)))
