"""Prepare a piece of a graph to be compiled as a whole.

A gradient that is a matrix product is added to `.grad` as soon as its factors are there, so that
they need not be held until the graph has run; see `autodiff/products.py`. A product with experts is
written as its parts; see `product_parts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from ...method.attention.flex_operators import fused_form
from ...method.dropout.dropout_operators import fused_dropout
from ...method.experts.rows_by_expert import FIRST_ROWS, OWN_ROWS
from ..autodiff.products import ADD_PRODUCT, GradientProduct
from ..autodiff.subgraphs import Subgraph, fake_of, results
from ..layouts.asked import ASKED
from .product_parts import ProductParts, is_expert_product

CLONE = torch.ops.aten.clone.default


@dataclass(frozen=True)
class Fusible:
    """The input of a compiler for a piece.

    Attributes:
        module: the graph; its placeholders are the piece's.
        examples: for each placeholder a fake tensor, with the type and strides of its values.
    """

    module: fx.GraphModule
    examples: tuple[torch.Tensor, ...]


def make_fusible(piece: Subgraph, products: Mapping[int, GradientProduct]) -> Fusible:
    """Copy the graph of a piece; in the copy, gradients that are products are added to `.grad`.

    Args:
        piece: the piece.
        products: its gradients that are products, by their index. Each becomes an operator that
            takes its number in this order, and gives an empty tensor in place of the gradient. The
            number is a tensor, so that the operators of equal layers are equal.
    """
    numbers = {product.nodes[0]: number for number, product in enumerate(products.values())}
    chosen = list(products.values())
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    constants = {node.target for node in piece.graph.nodes if node.op == "get_attr"}
    attributes: dict[str, Any] = {name: attrgetter(name)(piece.owner) for name in constants}
    parts = ProductParts(piece.graph, graph, copies)
    for node in piece.graph.nodes:
        if node in numbers:
            product = chosen[numbers[node]]
            factors = (copies[factor] for factor in product.factors)
            name = f"product_{numbers[node]}"
            attributes[name] = torch.tensor(numbers[node])
            number = graph.get_attr(name)
            added = graph.call_function(ADD_PRODUCT, (*factors, number, product.is_transposed))
            copies.update(dict.fromkeys(product.nodes, added))
        elif node.target is ASKED:  # only without a mesh: on a mesh, it has been replaced
            copies[node] = graph.call_function(CLONE, (copies[node.args[0]],))
        elif (fused := fused_form(node) or fused_dropout(node)) is not None:
            arguments = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = graph.call_function(fused, *arguments)
        elif is_expert_product(node):
            copies[node] = parts.add(node)
        elif node.target is OWN_ROWS:  # kernels have as many rows as fakes
            taken = fx.node.map_arg(node.args, copies.__getitem__)
            copies[node] = graph.call_function(OWN_ROWS, taken, {"all_rows": True})
        elif node.target is FIRST_ROWS:
            copies[node] = fx.node.map_arg(node.args[0], copies.__getitem__)
        elif node not in copies and node.op != "output":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results(piece.graph)))
    return Fusible(fx.GraphModule(attributes, graph), _examples(piece))


def _examples(piece: Subgraph) -> tuple[torch.Tensor, ...]:
    nodes = [node for node in piece.graph.nodes if node.op == "placeholder"]
    dense = (*(False for _ in piece.reads), *piece.dense)
    return tuple(
        fake_of(node).contiguous() if is_dense else fake_of(node)
        for node, is_dense in zip(nodes, dense, strict=True)
    )
