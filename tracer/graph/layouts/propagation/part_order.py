"""Nodes that run in other parts of a graph than the exchanges ask for that they wait for."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from ...autodiff.subgraphs import is_view
from ..cuts import CutProduct
from ..versions import Propagation


def is_plain_view(node: fx.Node) -> bool:
    """True if a node is a view, and its op gives no other result."""
    if node.target is operator.getitem or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return is_view(node)


def last_of_buckets(ops: Sequence[fx.Node], buckets: Mapping[fx.Node, int]) -> set[fx.Node]:
    """The last node of each bucket, but for the bucket that is complete last."""
    last = {buckets[node]: node for node in ops if node in buckets}
    ends = [node for node in ops if node in last.values()]
    return set(ends[:-1])


def is_product(node: fx.Node, propagation: Propagation) -> bool:
    """True if a dimension of a result is a product of cut factors, which no type has."""
    layouts = (layout for layout in propagation.layouts[node] if layout is not None)
    return any(isinstance(cut, CutProduct) for layout in layouts for cut in layout.cuts)
