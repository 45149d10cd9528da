"""Products of tokens with the quantized matrices of their experts.

The stored tensors of all experts are stacked. A product sorts rows by expert, as `expert_linear`
does, and dequantizes for each group of rows the matrix of its expert. On hosts it is one matrix at
a time, and only of experts that have rows. On devices, where a host does not know which these are,
it is all of a rank, for the time of the product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..experts.expert_products import (
    by_expert,
    group_by_group,
    in_order_of_ids,
    rows_by_group,
    sorted_rows,
)
from .dequantize import dequantized, rounded
from .weight_format import WeightFormat

_LIBRARY = torch.library.Library("cg", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "quantized_expert_linear(Tensor input, Tensor[] tensors, Tensor ids, str weight_format, "
    "int[] outputs, int inputs, bool rounds=True, bool turned=False, bool partial=False) -> Tensor"
)


class _ExpertProduct(torch.autograd.Function):
    """The product, whose backward dequantizes again; the stored tensors get no gradients.

    Args:
        input: `[tokens, in]` or `[tokens, choices, in]`.
        ids: `[tokens, choices]`.
        text: of the format.
        outputs, inputs: as the operator takes them.
        rounds: whether inputs are quantized as the format says. Their gradient is that of the
            rounded ones.
        tensors: as the operator takes them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        ids: Tensor,
        text: str,
        outputs: Sequence[int],
        inputs: int,
        rounds: bool,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(ids, *tensors)
        ctx.text, ctx.outputs, ctx.inputs, ctx.rows = text, outputs, inputs, input.dim()
        result: Tensor = torch.ops.cg.quantized_expert_linear(
            input, list(tensors), ids, text, outputs, inputs, rounds
        )
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (ids, *tensors) = gradients, ctx.saved_tensors
        to_input = torch.ops.cg.quantized_expert_linear(
            gradient, list(tensors), ids, ctx.text, ctx.outputs, ctx.inputs, False, True
        )
        to_input = to_input.sum(1) if ctx.rows == 2 else to_input
        return (to_input, *(None,) * (5 + len(tensors)))


def quantized_expert_linear(
    input: Tensor,
    tensors: Sequence[Tensor],
    ids: Tensor,
    weight_format: WeightFormat,
    outputs: Sequence[int],
    inputs: int,
    rounds: bool = True,
) -> Tensor:
    """Multiply each token by the quantized matrices of the experts that are chosen for it.

    Args:
        input: `[tokens, in]`, the same for each choice, or `[tokens, choices, in]`.
        tensors: layer by layer the stored tensors in the order of the format's names, each with a
            dimension of experts in front. All layers have one input.
        ids: integers `[tokens, choices]`, from 0 to the number of experts.
        weight_format: of the layers.
        outputs: of each layer.
        inputs: of all.
        rounds: whether inputs are quantized as the format says.

    Returns:
        `[tokens, choices, out]`, the outputs of the layers one behind the other, of the input's
        dtype.
    """
    result: Tensor = _ExpertProduct.apply(  # type: ignore[no-untyped-call]
        input, ids, weight_format.as_text, tuple(outputs), inputs, rounds, *tensors
    )
    return result


def _quantized_expert_linear(
    input: Tensor,
    tensors: list[Tensor],
    ids: Tensor,
    weight_format: str,
    outputs: list[int],
    inputs: int,
    rounds: bool = True,
    turned: bool = False,
    partial: bool = False,
) -> Tensor:
    """`turned`: multiply by transposed matrices; `partial`: as of `expert_linear`."""
    kind = WeightFormat.from_text(weight_format)
    order, ends = by_expert(ids, tensors[0].shape[0], partial)
    rows = sorted_rows(input, ids, order)
    products, at = [], 0
    for number, width in enumerate(outputs):
        own = tensors[number * len(kind.names) : (number + 1) * len(kind.names)]
        layer = _Layer(kind, own, width, inputs, rows.dtype)
        if turned:
            products.append(layer.product(rows[:, at : at + width], ends, True))
        else:
            own_rows = layer.rounded(rows, ends) if rounds else rows
            products.append(layer.product(own_rows, ends, False))
        at += width
    joined = torch.stack(products).sum(0) if turned else torch.cat(products, 1)
    return in_order_of_ids(joined, ids, order, ends, partial)


def one_at_a_time(device: torch.device) -> bool:
    """Whether matrices are dequantized for one expert after the other."""
    return device.type == "cpu"


class _Layer:
    """A quantized layer of each expert.

    Args:
        kind: of its tensors.
        tensors: in the order of the format's names, each with a dimension of experts in front.
        outputs, inputs: of the layer.
        dtype: of products.
    """

    def __init__(
        self,
        kind: WeightFormat,
        tensors: Sequence[Tensor],
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
    ) -> None:
        self.kind, self.sizes, self.dtype = kind, (outputs, inputs), dtype
        self.tensors = dict(zip(kind.names, tensors, strict=True))

    def product(self, rows: Tensor, ends: Tensor, turned: bool) -> Tensor:
        """Rows, in the order of their experts, times the matrices, or the transposed ones."""
        outputs, inputs = self.sizes
        if one_at_a_time(rows.device):
            width = inputs if turned else outputs

            def matrix(expert: int) -> Tensor:
                own = {name: tensor[expert] for name, tensor in self.tensors.items()}
                return self._dequantized(own) if turned else self._dequantized(own).t()

            return group_by_group(rows, matrix, width, ends)
        matrices = torch.vmap(self._dequantized)(self.tensors)
        return rows_by_group(rows, matrices if turned else matrices.transpose(1, 2), ends)

    def rounded(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Rows, in the order of their experts, as the format quantizes inputs."""
        activations = self.kind.activations
        if activations is None:
            return rows
        if not activations.scale:
            return rounded(activations, rows, None)
        scales = self.tensors[activations.scale].reshape(-1)
        places = torch.arange(len(rows), device=rows.device, dtype=torch.int32)
        expert = torch.searchsorted(ends, places, right=True).clamp(max=len(scales) - 1)
        return rounded(activations, rows, scales.index_select(0, expert).unsqueeze(1))

    def _dequantized(self, tensors: dict[str, Tensor]) -> Tensor:
        return dequantized(self.kind, tensors, *self.sizes).to(self.dtype)


def _shape_of(
    input: Tensor,
    tensors: list[Tensor],
    ids: Tensor,
    weight_format: str,
    outputs: list[int],
    inputs: int,
    rounds: bool = True,
    turned: bool = False,
    partial: bool = False,
) -> Tensor:
    return input.new_empty(*ids.shape, inputs if turned else sum(outputs))


_LIBRARY.impl(  # type: ignore[no-untyped-call]
    "quantized_expert_linear", _quantized_expert_linear, "CompositeExplicitAutograd"
)
torch.library.register_fake("cg::quantized_expert_linear", _shape_of, lib=_LIBRARY)

QUANTIZED_EXPERT_LINEAR = torch.ops.cg.quantized_expert_linear.default


@register_flop_formula(torch.ops.cg.quantized_expert_linear)
def _flops(
    input: Any,
    tensors: Any,
    ids: Any,
    weight_format: Any,
    outputs: Any,
    inputs: Any,
    *_: Any,
    out_shape: Any = None,
    **__: Any,
) -> int:
    """Two for each multiply-add."""
    return 2 * math.prod(map(int, (*ids, sum(outputs), inputs)))
