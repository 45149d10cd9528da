"""Count the bytes that a body holds beside its operands and its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from ...method.node_memory import memory_of
from ...values.operators import storage_key
from ..autodiff.products import find_products
from ..autodiff.subgraphs import Subgraph, results


def workspace_of(piece: Subgraph) -> int:
    """The most bytes that one run of a piece holds, beside its operands, state and results.

    Memory counts from the operator that makes it to the last one that uses it. Gradients that are
    matrix products add themselves to `.grad`, and have no memory. Others are held until they are
    added, which is at the end for small ones; large ones are added as soon as they are there, and
    count as if all were. Memory that an operator uses inside does not count.
    """
    graph = piece.graph
    added = {node for product in find_products(piece).values() for node in product.nodes}
    values = results(graph)
    outer = {memory_of(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    returned = {memory_of(node) for node in values[: len(piece.gives) + len(piece.rebinds)]}
    memories = {node: _memories(node) for node in graph.nodes}
    last = _last_uses(graph, memories)
    held: dict[int | None, int] = {}
    live = peak = done = 0
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        for key, size in () if node in added else memories[node]:
            if key not in outer and key not in held:
                held[key] = size
                live += size
                done += size if key in returned else 0
        peak = max(peak, live)
        for key in last.get(node, ()):
            if key in held and key not in returned:
                live -= held[key]
    return max(0, peak - done)


Memories: TypeAlias = list[tuple[int, int]]
"""The memory of each tensor of a node, and its bytes."""


def _last_uses(
    graph: fx.Graph, memories: Mapping[fx.Node, Memories]
) -> dict[fx.Node, Sequence[int]]:
    """For each node the memory that no later one uses."""
    seen: set[int] = set()
    last: dict[fx.Node, Sequence[int]] = {}
    for node in reversed(graph.nodes):
        if node.op != "call_function":
            continue
        used = dict.fromkeys(key for n in (node, *node.all_input_nodes) for key, _ in memories[n])
        last[node] = [key for key in used if key not in seen]
        seen.update(used)
    return last


def _memories(node: fx.Node) -> Memories:
    value = node.meta.get("val")
    leaves = (value,) if isinstance(value, torch.Tensor) else tree_leaves(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    keyed = [(storage_key(tensor), tensor) for tensor in tensors]
    return [(key, tensor.untyped_storage().nbytes()) for key, tensor in keyed if key is not None]
