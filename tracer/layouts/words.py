"""Put graphs into words that do not depend on names: equal graphs have equal words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from .versions import Version


class Name(str):
    """Stands for a node in a text."""

    def __repr__(self) -> str:
        return str(self)


def kind_of(node: fx.Node) -> str:
    """The types, shapes and strides of what a node gives."""
    val = node.meta.get("val")
    values = val if isinstance(val, (tuple, list)) else (val,)
    return ", ".join(
        f"{v.dtype}{list(v.shape)}{list(v.stride())}" if isinstance(v, torch.Tensor) else str(v)
        for v in values
    )


def names_of(inputs: Sequence[Version], nodes: Sequence[fx.Node]) -> dict[fx.Node, str]:
    """Numbers for the nodes of a part."""
    names: dict[fx.Node, str] = {}
    for node in (*(v.node for v in inputs), *nodes):
        names.setdefault(node, f"%{len(names)}")
    return names


def text_of_graph(graph: fx.Graph) -> str:
    """A graph in words that are the same for equal graphs."""
    names = {node: Name(f"%{i}") for i, node in enumerate(graph.nodes)}
    return "\n".join(
        f"{node.op} {node.target if node.op != 'placeholder' else ''} "
        f"{fx.node.map_arg((node.args, dict(node.kwargs)), names.__getitem__)} {kind_of(node)}"
        for node in graph.nodes
    )
