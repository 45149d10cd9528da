"""Products of few rows with quantized weights on devices, which read the stored tensors alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor

from ...tracer.method.quantized.quantized_kernel import (
    MOST,
    has_kernel,
    summands_of,
    tiles_of,
)
from ...tracer.method.quantized.quantized_product import quantized_product
from ...tracer.method.quantized.weight_format import Packing, WeightFormat
from .readers import AWQ_ORDER


def product_of_few(
    weight_format: WeightFormat, tensors: Mapping[str, Tensor], x: Tensor, outputs: int
) -> Tensor | None:
    """The product of an input and a quantized weight, if there is a kernel for it.

    Sums are float32, of numbers of the weight that are not rounded.

    Args:
        weight_format: of the tensors.
        tensors: of a layer, by name.
        x: [..., inputs], rounded if the format rounds inputs.
        outputs: of the layer.

    Returns:
        [..., outputs], of the dtype of `x`. None if there are more rows than `MOST`, or if the
        device has no kernel for these types. None also where levels are places in a table, and
        where scales are no numbers as they are stored. Scales and words have to be of whole runs
        of inputs and outputs, or it is None.
    """
    *lead, inputs = x.shape
    rows = x.numel() // inputs
    levels = tensors[weight_format.weight]
    if not 0 < rows <= MOST or not has_kernel(x.device, levels.dtype, x.dtype):
        return None
    if not weight_format.is_affine:
        return None
    per_output, per_input = _levels_of_word(weight_format.packing, weight_format.is_turned)
    group = weight_format.inputs_per_scale or inputs
    units = outputs // per_output
    tiles = tiles_of(rows, levels.dtype, per_output > 1, group, inputs, units)
    if inputs % group or group % per_input or tiles is None:
        return None
    length = _run(weight_format, per_output)
    shared = weight_format.outputs_per_scale
    if length is None or outputs % (length * per_output) or weight_format.by_index:
        return None
    runs, groups = outputs // (length * per_output), inputs // group

    def matrix(name: str) -> Tensor:
        tensor = tensors[name]
        return tensor.t() if weight_format.is_turned and tensor.dim() == 2 else tensor

    def spread(name: str) -> Tensor:
        tensor = matrix(name)
        return tensor.reshape(runs if shared else 1, -1, groups).expand(runs, -1, -1)

    zero = spread(weight_format.zero) if weight_format.zero else None
    summands = quantized_product(
        # A tile of one row is read by many threads, each of which would make float32 of it.
        (x.float() if rows == 1 else x).reshape(rows, groups, group // per_input, per_input),
        matrix(weight_format.weight).view(runs, length, groups, group // per_input),
        spread(weight_format.scale),
        zero,
        outputs_per_word=per_output,
        offset=weight_format.offset,
        zero_wraps=weight_format.zero_wraps,
        interleaved=weight_format.packing is not None and weight_format.packing.order == AWQ_ORDER,
        summands=summands_of(tiles, inputs, units),
    )
    # Additions become a part of the kernel that takes the product; a sum would be one of its own.
    total = reduce(torch.add, (summands[part] for part in range(len(summands))))
    return total.flatten(1).view(*lead, outputs).to(x.dtype)


def _levels_of_word(packing: Packing | None, is_turned: bool) -> tuple[int, int]:
    """The outputs, and the inputs, that have levels in a word."""
    if packing is None:
        return 1, 1
    count = len(packing.order)
    return (1, count) if (packing.dimension == 0) is is_turned else (count, 1)


def _run(weight_format: WeightFormat, per_output: int) -> int | None:
    """Units of outputs that share a scale, or a word of zero points; None if both do, or neither.

    Zero points that are packed are those of packed levels.
    """
    shared, zeros = weight_format.outputs_per_scale or 1, weight_format.zero_packing
    if weight_format.packing is None:
        return shared if zeros is None else None
    if shared > 1 or (weight_format.zero and zeros is None):
        return None
    return 1 if zeros is None else len(zeros.order) // per_output
