"""The graphs that ranks run for a part. Ranks with equal graphs share one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .....ir.layout import Layout, Position, shape_of
from ..cases import Shape
from ..cuts import CutProduct
from ..versions import Propagation, Version
from .local_graphs import build


@dataclass(frozen=True)
class Graphs:
    """The graphs of a part, for all ranks.

    Attributes:
        graphs: the distinct graphs. Placeholders are the part's inputs; the output is a tuple.
        of_rank: the index of each rank's graph.
    """

    graphs: tuple[fx.Graph, ...]
    of_rank: Mapping[int, int]

    def at(self, rank: int) -> fx.Graph:
        """The graph of a rank."""
        return self.graphs[self.of_rank[rank]]


def build_all(
    propagation: Propagation,
    ranks: Iterable[int],
    inputs: Sequence[Version],
    nodes: Sequence[fx.Node],
    outputs: Sequence[Version],
) -> Graphs:
    """The graphs of some nodes for some ranks; the other arguments are those of `build`."""
    basis = _Basis.of(propagation, inputs, nodes, outputs)
    by_key: dict[Hashable, int] = {}
    by_text: dict[str, int] = {}
    graphs: list[fx.Graph] = []
    of_rank: dict[int, int] = {}
    for rank in ranks:
        position = propagation.place.position(rank)
        key = basis.key(position)
        if key not in by_key:
            graph = build(propagation, position, inputs, nodes, outputs)
            by_key[key] = by_text.setdefault(_text(graph), len(graphs))
            if by_key[key] == len(graphs):
                graphs.append(graph)
        of_rank[rank] = by_key[key]
    return Graphs(tuple(graphs), of_rank)


@dataclass(frozen=True)
class _Basis:
    """The facts that a rank's graph depends on.

    Most ops depend on the shapes of their pieces alone. The rank's position matters as well where a
    piece is a slice of another piece, and for ops with a local form, which may differ from rank to
    rank.

    Attributes:
        shaped: layouts, with shapes of logical tensors, whose pieces' shapes matter.
        axes: the axes along which a rank's position matters.
    """

    shaped: tuple[tuple[Layout, Shape], ...]
    axes: tuple[str, ...]

    @staticmethod
    def of(
        propagation: Propagation,
        inputs: Sequence[Version],
        nodes: Sequence[fx.Node],
        outputs: Sequence[Version],
    ) -> _Basis:
        """The basis of some nodes; the arguments are those of `build`."""
        before = {t.after: t.before for t in propagation.transfers if not t.change.communicates}
        shaped: dict[tuple[Layout, Shape], None] = {}
        axes: dict[str, None] = {}
        taken = (version for node in nodes for version in propagation.reads.get(node, ()))
        pending = [*inputs, *outputs, *taken]
        while pending:
            version = pending.pop()
            shaped[version.layout, tuple(version.node.meta["val"].shape)] = None
            own = propagation.rows_of(version)
            axes |= dict.fromkeys(own.cut.axes if own is not None else ())
            if version in before:
                axes |= dict.fromkeys((*version.layout.axes, *before[version].layout.axes))
                pending.append(before[version])
        for node in nodes:
            shaped |= dict.fromkeys(_results(propagation, node))
            rows = propagation.own_rows.get(node)
            axes |= dict.fromkeys(rows.cut.axes if rows is not None else ())
            answer = propagation.answers.get(node)
            if answer is not None and answer.local is not None:
                layouts = (
                    *answer.wanted,
                    *(layout for layout in answer.results if layout is not None),
                )
                axes |= dict.fromkeys(axis for layout in layouts for axis in layout.axes)
        for layout, _ in shaped:
            merged = (cut for cut in layout.cuts if isinstance(cut, CutProduct))
            axes |= dict.fromkeys(axis for cut in merged for axis in cut.axes)
        cut = tuple((layout, shape) for layout, shape in shaped if any(layout.cuts))
        return _Basis(cut, tuple(axes))

    def key(self, position: Position) -> Hashable:
        """A key that is equal for positions with the same graph."""
        shapes = [shape_of(layout.region(shape, position)) for layout, shape in self.shaped]
        return tuple(shapes), tuple([position[axis] for axis in self.axes])


def _results(propagation: Propagation, node: fx.Node) -> Iterator[tuple[Layout, Shape]]:
    """The layouts and shapes of a node's results."""
    val = node.meta.get("val")
    values = val if isinstance(val, (tuple, list)) else (val,)
    for layout, value in zip(propagation.layouts[node], values, strict=True):
        if layout is not None and isinstance(value, torch.Tensor):
            yield layout, tuple(value.shape)


def kind(node: fx.Node) -> str:
    """A node's results in words: element type, shape and strides of each tensor."""
    val = node.meta.get("val")
    values = val if isinstance(val, (tuple, list)) else (val,)
    return ", ".join(
        f"{v.dtype}{list(v.shape)}{list(v.stride())}" if isinstance(v, torch.Tensor) else str(v)
        for v in values
    )


class Name(str):
    """The name of a node in a text, without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _text(graph: fx.Graph) -> str:
    """A graph in words; equal graphs have the same."""
    names: dict[fx.Node, Any] = {node: Name(f"%{i}") for i, node in enumerate(graph.nodes)}
    return "\n".join(
        f"{node.op} {node.target if node.op != 'placeholder' else ''} "
        f"{fx.node.map_arg((node.args, dict(node.kwargs)), names.__getitem__)} {kind(node)}"
        for node in graph.nodes
    )


def numbered(nodes: Iterable[fx.Node]) -> dict[fx.Node, str]:
    """Numbers for the nodes of a part, each once."""
    names: dict[fx.Node, str] = {}
    for node in nodes:
        names.setdefault(node, f"%{len(names)}")
    return names
