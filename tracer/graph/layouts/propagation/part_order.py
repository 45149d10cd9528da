"""Nodes that run in other parts of a graph than the exchanges ask for that they wait for."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence

import torch
from torch import fx

from ....values.operators import is_random
from ...autodiff.subgraphs import has_effect, is_view
from ..cuts import CutProduct
from ..versions import Propagation, Version


def gives_views(node: fx.Node) -> bool:
    """True if all results of a node are views; an item of several results belongs to its op."""
    if node.target is operator.getitem or node.meta.get("val") is None:
        return False
    return is_view(node)


def movable(
    node: fx.Node, known: Container[fx.Node], is_held: Callable[[fx.Node], bool]
) -> list[fx.Node]:
    """A node, and the known ones that take one of its results: these stay together.

    None, if one of them is held where it is, draws random numbers or has an effect.
    """
    items = (user for user in node.users if user.target is operator.getitem)
    group = [node, *(item for item in items if item in known)]
    if is_random(node.target, node.args, node.kwargs):
        return []
    return [] if any(has_effect(member) or is_held(member) for member in group) else group


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
