"""Make a piece of a graph fit to be compiled as a whole.

A gradient that is a matrix product is not computed by the compiled graph, which gives the factors
instead; see `products`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from ..autodiff.products import Product
from ..autodiff.subgraphs import Piece, fake_of, results


@dataclass(frozen=True)
class Fusible:
    """Input of a compiler for a piece.

    Attributes:
        module: the graph; its placeholders are the piece's.
        examples: for each of them a fake tensor of the type and strides that it takes.
        results: for each result of the piece where it is; or, of a product, where its factors are.
    """

    module: fx.GraphModule
    examples: tuple[torch.Tensor, ...]
    results: tuple[tuple[int, ...], ...]


def make_fusible(piece: Piece, products: Mapping[int, Product]) -> Fusible:
    """Copy the graph of a piece, with factors in the place of gradients that are products."""
    first = piece.returned + len(piece.rebinds)
    outputs: list[fx.Node] = []
    found: list[tuple[int, ...]] = []
    for index, value in enumerate(results(piece.graph)):
        product = products.get(index - first)
        parts = (value,) if product is None else product.factors
        found.append(tuple(range(len(outputs), len(outputs) + len(parts))))
        outputs += parts
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(piece.graph, copies)
    graph.output(tuple(copies[node] for node in outputs))
    graph.eliminate_dead_code()
    module = fx.GraphModule(piece.owner, graph)
    return Fusible(module, _examples(piece), tuple(found))


def _examples(piece: Piece) -> tuple[torch.Tensor, ...]:
    nodes = [node for node in piece.graph.nodes if node.op == "placeholder"]
    dense = (*(False for _ in piece.state), *piece.dense)
    return tuple(
        fake_of(node).contiguous() if is_dense else fake_of(node)
        for node, is_dense in zip(nodes, dense, strict=True)
    )
