"""The numbers that quantized tensors stand for, by torch's own operators.

They run wherever torch does, can be cut over ranks by the rules of views, and are fused. All is
computed in float32, from which a weight is rounded once to the type of the product.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from .weight_format import ActivationFormat, Packing, WeightFormat

FLOAT8_MOST = 448.0
"""The largest number of float8_e4m3fn."""
INT8_MOST, INT8_STEPS = 127.0, 127.5
"""The largest integer of 8 bits, and half the steps of all of them, by which scales are made."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def takes(weight_format: WeightFormat, name: str, dtype: torch.dtype | None) -> bool:
    """True if a stored tensor of a format may have an element type; None is of no type of torch."""
    if name in (weight_format.weight, weight_format.zero):
        is_weight = name == weight_format.weight
        packing = weight_format.packing if is_weight else weight_format.zero_packing
        if packing is not None:
            return dtype is (torch.uint8 if packing.is_of_bytes else torch.int32)
        return dtype in (torch.float8_e4m3fn, torch.int8)
    if name in (weight_format.index, *weight_format.kept):
        return dtype in (torch.uint8, torch.int32, torch.int64)
    if name == weight_format.scale and (weight_format.nested or weight_format.scale_bias):
        return dtype is torch.uint8
    return dtype in FLOATS


def dequantized(
    weight_format: WeightFormat, tensors: Mapping[str, Tensor], outputs: int, inputs: int
) -> Tensor:
    """The weight that the tensors of a layer stand for, float32 [outputs, inputs].

    Args:
        weight_format: of the tensors.
        tensors: by name.
        outputs, inputs: of the layer.
    """
    rows, columns = weight_format.turned(outputs, inputs)
    per_row, per_column = weight_format.turned(
        weight_format.outputs_per_scale, weight_format.inputs_per_scale
    )
    levels, packing = tensors[weight_format.weight], weight_format.packing
    if packing is not None:
        levels = unpacked(packing, levels, (rows, columns)[packing.dimension])
    if weight_format.table or weight_format.numbers:
        levels = _looked_up(_table(weight_format, tensors), levels)
    scale, zero = _scale(weight_format, tensors), _zero(weight_format, tensors, outputs)
    if weight_format.by_index:
        along, numbers = 0 if weight_format.is_turned else 1, tensors[weight_format.index]
        scale = scale.index_select(along, numbers)
        zero = None if zero is None else zero.index_select(along, numbers)
        per_row, per_column = weight_format.turned(weight_format.outputs_per_scale, 1)
    per_row, per_column = min(per_row or rows, rows), min(per_column or columns, columns)
    shared = _filled(_filled(levels.float(), 0, per_row), 1, per_column)
    shared = shared.reshape(-1, per_row, shared.shape[1] // per_column, per_column)
    if zero is not None:
        shared = shared - _spread(zero)
    elif weight_format.offset:
        shared = shared - weight_format.offset
    weight = (shared * _spread(scale)).flatten(2, 3).flatten(0, 1)
    weight = _narrowed(_narrowed(weight, 0, rows), 1, columns)
    return weight.t() if weight_format.is_turned else weight


def unpacked(packing: Packing, words: Tensor, size: int) -> Tensor:
    """The integers in words, int32, from 0 on: `size` of them along the packed dimension."""
    at = packing.dimension
    places = [packing.bits * place for place in packing.order]
    shape = [1] * (words.dim() + 1)
    shape[at + 1] = len(places)
    shifts = torch.tensor(places, dtype=torch.int32, device=words.device).view(shape)
    integers = (words.unsqueeze(at + 1) >> shifts) & (1 << packing.bits) - 1
    return _narrowed(integers.flatten(at, at + 1), at, size)


def rounded(activations: ActivationFormat, x: Tensor, scale: Tensor | None) -> Tensor:
    """The numbers that a quantized input stands for.

    Args:
        activations: how it is quantized.
        x: [..., inputs].
        scale: the stored one, if there is one.

    Returns:
        A tensor of the shape and dtype of `x`.
    """
    numbers = x.float()
    if scale is not None:
        scale = scale.float()
        return (_levels(activations, numbers / scale) * scale).to(x.dtype)
    size = x.shape[-1]
    width = activations.inputs_per_scale or size
    numbers = _filled(numbers, x.dim() - 1, width).reshape(*x.shape[:-1], -1, width)
    steps = FLOAT8_MOST if activations.is_float else INT8_STEPS
    scales = numbers.abs().amax(-1, keepdim=True) / steps
    if activations.is_power:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    levels = _levels(activations, numbers / scales)
    return _narrowed((levels * scales).flatten(-2), x.dim() - 1, size).to(x.dtype)


def _levels(activations: ActivationFormat, numbers: Tensor) -> Tensor:
    if activations.is_float:
        return numbers.clamp(-FLOAT8_MOST, FLOAT8_MOST).to(torch.float8_e4m3fn).float()
    return numbers.clamp(-INT8_MOST - 1, INT8_MOST).round()


def _table(weight_format: WeightFormat, tensors: Mapping[str, Tensor]) -> Tensor:
    """The numbers whose places levels are, float32."""
    if weight_format.table:
        return tensors[weight_format.table].float()
    device = tensors[weight_format.weight].device
    return torch.tensor(weight_format.numbers, dtype=torch.float32, device=device)


def _looked_up(table: Tensor, places: Tensor) -> Tensor:
    """The numbers of a table at places, wherever ranks cut these."""
    return F.embedding(places.int(), table.unsqueeze(1)).squeeze(-1)


def _scale(weight_format: WeightFormat, tensors: Mapping[str, Tensor]) -> Tensor:
    """The scales, float32, as they are stored otherwise."""
    scale, nested = tensors[weight_format.scale], weight_format.nested
    if nested is not None:
        shared = tensors[nested.scale].float().repeat_interleave(nested.run)
        shared = _narrowed(shared, 0, scale.numel()).view(scale.shape)
        return _looked_up(tensors[nested.table].float(), scale) * shared + nested.offset
    if weight_format.scale_bias is not None:
        return torch.exp2(scale.float() - weight_format.scale_bias)
    return scale.float() if weight_format.steps == 1 else scale.float() / weight_format.steps


def _zero(
    weight_format: WeightFormat, tensors: Mapping[str, Tensor], outputs: int
) -> Tensor | None:
    """The zero points, as scales have them; None if the format has none."""
    if not weight_format.zero:
        return None
    zero, packing = tensors[weight_format.zero], weight_format.zero_packing
    if packing is None:
        return zero.float() + weight_format.offset
    zero = unpacked(packing, zero, outputs) + weight_format.offset
    return (zero & (1 << packing.bits) - 1 if weight_format.zero_wraps else zero).float()


def _filled(x: Tensor, dim: int, unit: int) -> Tensor:
    """A tensor with zeros at the end of a dimension, so that it has whole units."""
    missing = -x.shape[dim] % unit
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x


def _narrowed(x: Tensor, dim: int, size: int) -> Tensor:
    """The first entries of a dimension."""
    return x if x.shape[dim] == size else x.narrow(dim, 0, size)


def _spread(scale: Tensor) -> Tensor:
    """Scales [rows, columns], [rows] or of one entry, for numbers [rows, n, columns, m]."""
    if scale.numel() == 1:
        return scale.reshape(1, 1, 1, 1)
    rows, columns = (*scale.shape, 1)[:2]
    return scale.reshape(rows, 1, columns, 1)
