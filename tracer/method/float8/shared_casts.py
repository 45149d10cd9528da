"""Layers that multiply one input share its cast to float8.

Each layer scales and casts its input by itself, as the projections to queries, keys and values do.
So a traced graph has these operators once for each of them. On a mesh each greatest magnitude is
a reduction over ranks, and each cast is saved for the backward.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import fx
from torch.fx.immutable_collections import immutable_dict, immutable_list

from ...values.operators import is_random, storage_key, written_values
from ..reuse.saving_functions import META
from .formula import FLOAT8_MM

_SCALED = torch.ops.aten.mul.Tensor


def share_casts(graph: fx.Graph, forward: frozenset[str]) -> None:
    """Compute once, in place, what products of float8 take several times of one tensor.

    Only operators of a single tensor and products of two are merged, since these are what the
    formula of float8 consists of. A forward and a backward share none: what a backward takes of a
    forward is saved, and that is decided elsewhere.

    Args:
        graph: the graph.
        forward: the names of the nodes of the forward.
    """
    operands = _leading_to_products(graph)
    first: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes) if operands else ():
        if node not in operands:
            continue
        marks = node.meta.get(META), node.name in forward
        kwargs = immutable_dict(node.kwargs)
        known = first.setdefault((node.target, _typed((node.args, kwargs)), marks), node)
        if known is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)


def _leading_to_products(graph: fx.Graph) -> set[fx.Node]:
    """The nodes from which operands of products of float8 follow, back to an operator of others."""
    written = _written(graph)
    results = set(graph.output_node().all_input_nodes)
    pending = [node for mm in graph.nodes if mm.target is FLOAT8_MM for node in mm.all_input_nodes]
    leading = set[fx.Node]()
    while pending:
        node = pending.pop()
        if node not in leading and node not in results and _may_merge(node, written):
            leading.add(node)
            pending += node.all_input_nodes
    return leading


def _may_merge(node: fx.Node, written: set[int | None]) -> bool:
    """True if equal nodes have equal values, and nothing writes to what they take or give."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return False
    if is_random(node.target, node.args, node.kwargs) or node.target is FLOAT8_MM:
        return False
    if len(node.all_input_nodes) != 1 and node.target is not _SCALED:
        return False
    return written.isdisjoint(map(_memory, (node, *node.all_input_nodes)))


def _written(graph: fx.Graph) -> set[int | None]:
    """The memories that a graph writes to."""
    values = [
        value
        for node in graph.nodes
        for value in written_values(node.target, node.args, node.kwargs)
        if isinstance(value, fx.Node)
    ]
    return set(map(_memory, values)) - {None}


def _memory(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return storage_key(value) if isinstance(value, torch.Tensor) else None


def _typed(argument: object) -> Hashable:
    """An argument with the types of its numbers: 1, 1.0 and True are equal, and not alike."""
    if isinstance(argument, (tuple, list, immutable_list)):
        return tuple(map(_typed, argument))
    if isinstance(argument, dict):
        return tuple((key, _typed(value)) for key, value in argument.items())
    return type(argument), argument
