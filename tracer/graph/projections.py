"""Find the projections of a traced graph, and which of them lead to which.

A projection is a product with a weight of two dimensions. One leads to another if its result
reaches the input of the other through no third projection.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten

_SWAPS = frozenset({_aten.t.default, _aten.transpose.int, _aten.permute.default})
_CARRIES = _SWAPS | {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.expand.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.detach.default,
    _aten.alias.default,
}
"""Ops after which a weight is still that weight."""

_VIEWS = frozenset({_aten.view.default, _aten._unsafe_view.default})
_KEEPS = _VIEWS | {
    _aten.add.Tensor,
    _aten.mul.Tensor,
    _aten.div.Tensor,
    _aten.clamp.default,
    _aten.alias.default,
}
"""Ops between a product and the first op that takes its result apart: a bias, a scale, a cap."""

_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.bmm.default})


@dataclass
class Projection:
    """A weight that products take, and what its results become.

    Attributes:
        path: of the weight.
        outputs: the dimension of the weight that makes outputs: 0 or 1.
        blocks: the sizes of the parts into which its result is split; empty if it is not.
        parts: the number of heads, as which its result is seen; None: it is not seen as heads.
        sources: the paths of what leads to it.
        bias: the path of what is added to its results; None: nothing is.
    """

    path: str
    outputs: int
    bias: str | None = None
    blocks: tuple[int, ...] = ()
    parts: int | None = None
    sources: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Projections:
    """The projections of a graph.

    Attributes:
        of: each, by path.
        tables: the paths of weights whose rows are looked up: embeddings.
        ends: the paths of those that lead to a result.
    """

    of: Mapping[str, Projection]
    tables: frozenset[str]
    ends: frozenset[str]

    def leads_to(self, path: str) -> set[str]:
        """The paths of the projections that a weight leads to."""
        return {other.path for other in self.of.values() if path in other.sources}


def find_projections(
    forward: list[fx.Node], paths: Mapping[fx.Node, str], results: list[fx.Node]
) -> Projections:
    """Find projections.

    Args:
        forward: the nodes of the forward, in order.
        paths: of the parameters, by placeholder. Parameters of one path count as one.
        results: the nodes of what is returned.
    """
    run = _ProjectionSearch(paths, frozenset(forward))
    for node in forward:
        run.visit(node)
    ends: set[str] = set().union(*(run.sources[node] for node in results))
    return Projections(run.projections, frozenset(run.tables), frozenset(ends))


class _ProjectionSearch:
    def __init__(self, paths: Mapping[fx.Node, str], forward: frozenset[fx.Node]) -> None:
        self.forward = forward
        self.biases = {node: path for node, path in paths.items() if node.meta["val"].dim() == 1}
        self.projections: dict[str, Projection] = {}
        self.tables: set[str] = set()
        self.sources: dict[fx.Node, frozenset[str]] = {}
        self.weights: dict[fx.Node, tuple[str, int]] = {
            node: (path, 1) for node, path in paths.items() if node.meta["val"].dim() == 2
        }
        self.others = {n: p for n, p in paths.items() if n.meta["val"].dim() > 2}

    def visit(self, node: fx.Node) -> None:
        if node.target in _CARRIES and node.args[0] in self.weights:
            path, outputs = self.weights[node.args[0]]  # type: ignore[index]
            self.weights[node] = path, outputs ^ (node.target in _SWAPS)
        elif node.target in _PRODUCTS and node.args[-1] in self.weights:
            self._product(node)
        elif node.target is _aten.embedding.default and node.args[0] in self.weights:
            path, _ = self.weights[node.args[0]]  # type: ignore[index]
            self.tables.add(path)
            self.sources[node] = frozenset({path})
            return
        self.sources.setdefault(node, self._union(node))

    def _union(self, node: fx.Node) -> frozenset[str]:
        own = {self.others[node]} if node in self.others else set()
        inputs = (self.sources.get(source, frozenset()) for source in node.all_input_nodes)
        return frozenset(own.union(*inputs))

    def _product(self, node: fx.Node) -> None:
        path, outputs = self.weights[node.args[-1]]  # type: ignore[index]
        projection = self.projections.setdefault(path, Projection(path, outputs))
        taken = node.args[-2]
        assert isinstance(taken, fx.Node)
        projection.sources |= self.sources.get(taken, frozenset())
        width = node.meta["val"].shape[-1]
        projection.blocks = projection.blocks or tuple(self._blocks(node, width))
        projection.parts = projection.parts or self._parts(node, width)
        if node.target is _aten.addmm.default:
            projection.bias = self.biases.get(node.args[0])  # type: ignore[arg-type]
        self.sources[node] = frozenset({path})

    def _followers(self, node: fx.Node, width: int) -> Iterator[fx.Node]:
        """The users of a result, behind views that leave its last dimension as it is."""
        for user in node.users:
            if user not in self.forward:
                continue
            if user.target in _KEEPS and user.meta["val"].shape[-1:] == (width,):
                yield from self._followers(user, width)
            else:
                yield user

    def _blocks(self, node: fx.Node, width: int) -> Iterator[int]:
        """The sizes of the parts into which the last dimension of a result is split."""
        for user in self._followers(node, width):
            values: Any = user.meta.get("val")
            if user.target in (_aten.split.Tensor, _aten.split_with_sizes.default):
                sizes = [value.shape[-1] for value in values]
                if sum(sizes) == width:
                    yield from sizes
            elif user.target is _aten.slice.Tensor and values.shape[-1] < width:
                yield values.shape[-1]

    def _parts(self, node: fx.Node, width: int) -> int | None:
        """The number of heads as which a result is seen."""
        pending = list(self._followers(node, width))
        while pending:
            user = pending.pop(0)
            value = user.meta.get("val")
            if user.target in (_aten.split.Tensor, _aten.split_with_sizes.default):
                pending += list(user.users)
            elif user.target in (operator.getitem, _aten.slice.Tensor):
                pending += [n for n in user.users if n in self.forward]
            elif user.target in _VIEWS and isinstance(value, torch.Tensor):
                before = user.args[0].meta["val"].shape  # type: ignore[union-attr]
                for dim in reversed(range(value.dim() - 1)):
                    if math.prod(value.shape[dim:]) == before[-1]:
                        return int(value.shape[dim])
        return None
