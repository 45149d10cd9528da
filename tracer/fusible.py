"""Making a piece of a graph fit to be compiled as a whole.

A gradient that is a matrix product is not computed by the compiled graph, which gives the factors
instead: added to a gradient that is there already, the product needs no memory of its own, and is
rounded once instead of twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from .graphs import Piece, fake_of

_ATEN = torch.ops.aten


@dataclass(frozen=True)
class Result:
    """One result of a piece, among those of what is compiled.

    Attributes:
        indices: where it is; or, of a product, where its two factors are.
        transposed: whether it is the transpose of the product.
    """

    indices: tuple[int, ...]
    transposed: bool = False


@dataclass(frozen=True)
class Fusible:
    """What a compiler gets of a piece.

    Attributes:
        module: the graph; its placeholders are the piece's.
        examples: for each of them a fake tensor of the type and strides that it takes.
        results: for each result of the piece where it is.
    """

    module: fx.GraphModule
    examples: tuple[torch.Tensor, ...]
    results: tuple[Result, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """A gradient that has yet to be computed: `one @ other`, or the transpose of that."""

    one: torch.Tensor
    other: torch.Tensor
    transposed: bool

    def made_for(self, parameter: torch.Tensor) -> torch.Tensor:
        """The gradient, with the strides of its parameter."""
        gradient = torch.empty_like(parameter, requires_grad=False)
        torch.mm(self.one, self.other, out=gradient.t() if self.transposed else gradient)
        return gradient

    def add_to(self, gradient: torch.Tensor) -> None:
        """Add it to what is there."""
        (gradient.t() if self.transposed else gradient).addmm_(self.one, self.other)


def results(graph: fx.Graph) -> Sequence[fx.Node]:
    """What a piece's graph gives."""
    (values,) = graph.output_node().args
    assert isinstance(values, (tuple, list))
    return values  # type: ignore[return-value]


def make_fusible(piece: Piece) -> Fusible:
    """Copy the graph of a piece, with factors in the place of gradients that are products."""
    values = results(piece.graph)
    first = piece.returned + len(piece.rebinds)
    outputs: list[fx.Node] = []
    found: list[Result] = []
    for index, value in enumerate(values):
        product = _product(piece, value, index - first) if index >= first else None
        parts = (value,) if product is None else product.nodes
        at = tuple(range(len(outputs), len(outputs) + len(parts)))
        outputs += parts
        found.append(Result(at, product is not None and product.transposed))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(piece.graph, copies)
    graph.output(tuple(copies[node] for node in outputs))
    graph.eliminate_dead_code()
    module = fx.GraphModule(piece.owner, graph)
    return Fusible(module, _examples(piece), tuple(found))


@dataclass(frozen=True)
class _Factors:
    nodes: tuple[fx.Node, fx.Node]
    transposed: bool


def _product(piece: Piece, value: fx.Node, gradient: int) -> _Factors | None:
    """The factors of a gradient that is a product which nothing else uses."""
    parameter = piece.gradients[gradient].tensor.tensor
    node, transposed = value, False
    while node.target is _ATEN.t.default and len(node.users) == 1:
        (node,), transposed = node.all_input_nodes, not transposed
    if node.target is not _ATEN.mm.default or len(node.users) != 1:
        return None
    one, other = node.args
    assert isinstance(one, fx.Node)
    assert isinstance(other, fx.Node)
    alike = all(fake_of(n).dtype == parameter.dtype for n in (one, other))
    return _Factors((one, other), transposed) if alike and not parameter.is_sparse else None


def _examples(piece: Piece) -> tuple[torch.Tensor, ...]:
    nodes = [node for node in piece.graph.nodes if node.op == "placeholder"]
    dense = (*(False for _ in piece.state), *piece.dense)
    return tuple(
        fake_of(node).contiguous() if is_dense else fake_of(node)
        for node, is_dense in zip(nodes, dense, strict=True)
    )
