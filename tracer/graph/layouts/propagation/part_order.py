"""Nodes that run in other parts of a graph than the exchanges ask for that they wait for."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import fx

from ...autodiff.subgraphs import is_view
from ..cuts import CutProduct
from ..versions import Propagation, Version


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
    """True if a dimension of a value is a product of cut factors, which no type has.

    A tuple is none, nor are its items, which stay with it.
    """
    if node.target is operator.getitem or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return any(isinstance(cut, CutProduct) for cut in propagation.layout(node).cuts)


def behind_part_ahead(
    passing: Collection[Version],
    reads: Mapping[fx.Node, Iterable[Version]],
    level: Mapping[fx.Node, int],
) -> dict[Version, int]:
    """The part behind which each version is gathered for the ops that read it, and not before.

    Args:
        passing: the versions.
        reads: the versions that each op reads.
        level: the part of each op.
    """
    first: dict[Version, int] = {}
    for node, versions in reads.items():
        for version in versions:
            if version in passing:
                first[version] = min(first.get(version, level[node]), level[node])
    return {version: part - 1 for version, part in first.items()}
