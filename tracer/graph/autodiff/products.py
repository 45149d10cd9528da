"""Add gradients that are matrix products to `.grad` by the product itself.

An `addmm_` to `.grad` needs no memory for the product, reads and writes `.grad` once, and rounds
once instead of twice: in half precision the sum is nearer to the exact one than autograd's. In a
model of matrices nearly all gradients are products.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, fx

from ...operator_library import defined
from ...values.gradient_buckets import set_gradient
from .subgraphs import Subgraph, fake_of, results

_ATEN = torch.ops.aten


@dataclass(frozen=True)
class GradientProduct:
    """A gradient that is the product of two matrices, and that nothing else uses.

    Attributes:
        nodes: the node of the product, then nodes that transpose it; the last is the gradient.
        factors: the matrices.
    """

    nodes: tuple[fx.Node, ...]
    factors: tuple[fx.Node, fx.Node]

    @property
    def is_transposed(self) -> bool:
        """True if the gradient is the transpose of the product."""
        return len(self.nodes) % 2 == 0


def find_products(piece: Subgraph) -> dict[int, GradientProduct]:
    """The gradients of a piece that are products, by their index among its gradients."""
    every = results(piece.graph)
    first = len(piece.gives) + len(piece.rebinds)
    product_of = {}
    for index, (value, gradient) in enumerate(zip(every[first:], piece.gradients, strict=True)):
        product = _product(value, gradient.tensor.tensor) if every.count(value) == 1 else None
        if product is not None:
            product_of[index] = product
    return product_of


def _product(gradient: fx.Node, parameter: torch.Tensor) -> GradientProduct | None:
    nodes = [gradient]
    while nodes[0].target is _ATEN.t.default and len(nodes[0].users) == 1:
        nodes.insert(0, nodes[0].all_input_nodes[0])
    if nodes[0].target is not _ATEN.mm.default or len(nodes[0].users) != 1:
        return None
    left, right = nodes[0].args
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    if parameter.is_sparse or any(fake_of(n).dtype != parameter.dtype for n in (left, right)):
        return None
    return GradientProduct(tuple(nodes), (left, right))


def is_expanded_for_products(node: fx.Node) -> bool:
    """True if a node expands a tensor that several products take, such as the gradient of a sum."""
    if node.target is not _ATEN.expand.default:
        return False
    users = [user for user in node.users if user.target is not _ATEN.t.default]
    for user in node.users:
        users += user.users if user.target is _ATEN.t.default else ()
    return sum(user.target is _ATEN.mm.default for user in users) > 1


def add_product(
    parameter: Tensor,
    one: Tensor,
    other: Tensor,
    is_transposed: bool,
    memory: Mapping[int, Tensor],
) -> None:
    """Add `one @ other`, or its transpose, to `.grad` of a parameter.

    A parameter without a gradient gets one with the parameter's strides.

    Args:
        parameter: the parameter.
        one, other: the matrices, `[m, k]` and `[k, n]`.
        is_transposed: whether the gradient is the transpose of the product.
        memory: memory for gradients of parameters that have none, by the parameter's id.
    """
    gradient = parameter.grad
    if gradient is None:
        gradient = memory.get(id(parameter))
        if gradient is None:
            gradient = torch.empty_like(parameter, device=one.device, requires_grad=False)
        torch.mm(one, other, out=gradient.t() if is_transposed else gradient)
        set_gradient(parameter, gradient)
    elif gradient.dtype is one.dtype:
        (gradient.t() if is_transposed else gradient).addmm_(one, other)
    else:  # `.grad` has another type, by `Tensor.grad_dtype`, and BLAS cannot add to it
        product = torch.mm(one, other)
        gradient.add_(product.t() if is_transposed else product)


class _Sums(threading.local):
    """The parameters to which this thread's compiled graph adds products: see `adding_to`."""

    parameters: Sequence[Tensor] = ()
    memory: Mapping[int, Tensor] = MappingProxyType({})


_sums = _Sums()


def adding_to(
    parameters: Sequence[Tensor],
    memory: Mapping[int, Tensor],
    compute: Callable[[list[Tensor]], Sequence[Tensor]],
    values: list[Tensor],
) -> Sequence[Tensor]:
    """Compute a graph in which `ADD_PRODUCT` adds to parameters, by their number.

    Args:
        parameters: the parameters.
        memory: as for `add_product`.
        compute: computes the graph.
        values: the values of its placeholders; `compute` empties the list.

    Returns:
        The results of the graph.
    """
    before = _sums.parameters, _sums.memory
    _sums.parameters, _sums.memory = parameters, memory
    try:
        return compute(values)
    finally:
        _sums.parameters, _sums.memory = before


def _add(one: Tensor, other: Tensor, number: Tensor, is_transposed: bool) -> Tensor:
    add_product(_sums.parameters[int(number)], one, other, is_transposed, _sums.memory)
    return one.new_empty(0)


ADD_PRODUCT = defined(
    "add_product(Tensor one, Tensor other, Tensor number, bool is_transposed) -> Tensor",
    _add,
    lambda one, other, number, is_transposed: one.new_empty(0),
)
"""`add_product` as an operator, for compiled graphs: `adding_to` knows the parameters.

Its result is an empty tensor. The graph returns it, so that no compiler drops the operator.
"""
