"""Products with experts, written as their parts, for a compiler that fuses kernels.

Run as they are, these products sort their rows by expert, multiply them and bring them back, each
by itself. Written as an order, gathers and a product in groups, the gathers become part of the
kernels around the product, and what several products of the same ids share is computed once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ...method.experts.expert_products import (
    EXPERT_LINEAR,
    EXPERT_ORDER,
    EXPERT_OUTER,
    GROUPED_MM,
)
from ...method.node_memory import memory_of
from ...values.operators import written_values
from ..autodiff.subgraphs import fake_of

_ATEN = torch.ops.aten


def is_expert_product(node: fx.Node) -> bool:
    return node.target in (EXPERT_LINEAR, EXPERT_OUTER)


class ProductParts:
    """Adds the parts of a graph's products to a copy of it.

    Args:
        graph: the graph that has products.
        copy: the graph to add to.
        copies: the copy of each of its nodes.
    """

    def __init__(self, graph: fx.Graph, copy: fx.Graph, copies: Mapping[fx.Node, fx.Node]) -> None:
        self._copy, self._copies = copy, copies
        self._known: dict[tuple[Any, ...], fx.Node] = {}
        self._written = {
            memory_of(value)
            for node in graph.nodes
            if node.op == "call_function"
            for value in written_values(node.target, node.args, node.kwargs)
            if isinstance(value, fx.Node)
        }

    def add(self, product: fx.Node) -> fx.Node:
        """Add the parts of a product, and return its result in the copy."""
        is_linear = product.target is EXPERT_LINEAR
        add: Callable[..., fx.Node] = self._add_linear if is_linear else self._add_outer
        return add(*product.args, **product.kwargs)

    def _add_linear(
        self, rows: fx.Node, weight: fx.Node, ids: fx.Node, partial: bool = False
    ) -> fx.Node:
        experts, width, _ = fake_of(weight).shape
        order, place, ends = self._order(ids, experts, partial)
        matrices = self._call(_ATEN.transpose.int, self._copies[weight], 1, 2)
        product = self._call(GROUPED_MM, self._sorted(rows, ids, order), matrices, ends)
        if partial:
            product = self._call(_with_zeros_behind, product, ends)
        product = self._call(_ATEN.index_select.default, product, 0, place)
        return self._call(_ATEN.view.default, product, [*fake_of(ids).shape, width])

    def _add_outer(
        self, left: fx.Node, right: fx.Node, ids: fx.Node, experts: int, partial: bool = False
    ) -> fx.Node:
        order, _, ends = self._order(ids, experts, partial)
        columns = self._call(_ATEN.t.default, self._sorted(left, ids, order))
        return self._call(GROUPED_MM, columns, self._sorted(right, ids, order), ends)

    def _order(self, ids: fx.Node, experts: int, partial: bool) -> tuple[fx.Node, ...]:
        def add() -> fx.Node:
            return self._call(EXPERT_ORDER, self._copies[ids], experts, partial)

        results = self._once(ids, (EXPERT_ORDER, experts, partial), add)
        return tuple(self._call(operator.getitem, results, index) for index in range(3))

    def _sorted(self, rows: fx.Node, ids: fx.Node, order: fx.Node) -> fx.Node:
        """Rows of tokens, or of tokens and choices, in the order of their experts."""

        def add() -> fx.Node:
            table, index = self._copies[rows], order
            if fake_of(rows).dim() == 2:
                index = self._call(_ATEN.floor_divide.default, order, fake_of(ids).shape[1])
            else:
                table = self._call(_ATEN.reshape.default, table, [-1, fake_of(rows).shape[2]])
            return self._call(_ATEN.index_select.default, table, 0, index)

        return self._once(rows, (_ATEN.index_select, order), add)

    def _once(self, of: fx.Node, key: tuple[Any, ...], add: Callable[[], fx.Node]) -> fx.Node:
        """Add nodes computed of a node, unless they are there and nothing writes to its memory."""
        if memory_of(of) in self._written:
            return add()
        if (of, *key) not in self._known:
            self._known[of, *key] = add()
        return self._known[of, *key]

    def _call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        return self._copy.call_function(target, args)


def _with_zeros_behind(rows: Tensor, ends: Tensor) -> Tensor:
    """Rows whose group is none are zeros: they are of experts elsewhere."""
    is_here = torch.arange(len(rows), device=rows.device) < ends[-1]
    return torch.where(is_here.unsqueeze(1), rows, 0)
