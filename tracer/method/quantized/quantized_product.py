"""Products of few rows with a quantized weight, of which each byte is read once.

A step of decoding takes as long as its weights take to be read. This operator reads the stored
levels and no other form of the weight: it multiplies rows by levels, and sums of inputs that share
a scale by the scale. All sums are float32, and no number of the weight is rounded. On CUDA devices
it is one of two kernels of Triton (`quantized_kernel.py`), elsewhere torch's own operators.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...operator_library import defined
from .quantized_kernel import multiply

WORD = 32
"""Bits of a word that several levels are packed in."""


def quantized_product(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    *,
    outputs_per_word: int = 1,
    offset: int = 0,
    zero_wraps: bool = False,
    interleaved: bool = False,
    summands: int = 1,
) -> Tensor:
    """Multiply rows by a quantized weight.

    A weight has `groups` of inputs, each of `units`, and `runs` of outputs, each of `length`. A
    unit is a level, or a word of 32 bits with levels of several inputs, or of several outputs.

    Args:
        input: `[rows, groups, units, inputs of a word]`.
        weight: `[runs, length, groups, units]`, of any strides: float8_e4m3fn or int8, or int32
            words.
        scale: `[runs, scales of a run, groups]`.
        zero: zero points, int8 as `scale`, or int32 words `[runs, words of a run, groups]` that are
            packed along outputs; None: there are none.
        outputs_per_word: of `weight`; 1 unless words have levels of several outputs.
        offset: what is subtracted from a level, beside its zero point.
        zero_wraps: whether a zero point, with the offset, has no more bits than it is stored in.
        interleaved: whether a word has even outputs in its lower half, and odd ones in the upper.
        summands: of the result.

    Returns:
        float32 `[summands, rows, runs, length, outputs_per_word]`; the product is their sum.
    """
    result: Tensor = torch.ops.cg.quantized_product(
        *(input, weight, scale, zero),
        *(outputs_per_word, offset, zero_wraps, interleaved, summands),
    )
    return result


def _on_host(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    outputs_per_word: int,
    offset: int,
    zero_wraps: bool,
    interleaved: bool,
    summands: int,
) -> Tensor:
    """The first summand is the product, and the others are zeros."""
    runs, length, groups, units = weight.shape
    inputs_per_word = input.shape[3]
    levels = _integers(weight, max(outputs_per_word, inputs_per_word), interleaved).float()
    levels = levels.view(runs, length, groups, units, outputs_per_word, inputs_per_word)
    zeros = scale.new_full((1, 1, 1), offset, dtype=torch.float32)
    if zero is not None and zero.dtype is torch.int32:
        per_word = length * outputs_per_word // zero.shape[1]
        points = _integers(zero, per_word, interleaved) + offset
        points = points & (1 << WORD // per_word) - 1 if zero_wraps else points
        zeros = points.transpose(2, 3).flatten(1, 2).float()
    elif zero is not None:
        zeros = zero.float() + offset
    sums = torch.einsum("mJwe,PuJwoe->JmPuo", input.float(), levels)
    totals = torch.einsum("mJwe->Jm", input.float())[..., None, None, None]

    def spread(shared: Tensor) -> Tensor:
        """Numbers `[runs, of a run, groups]` as `[groups, 1, runs, length, outputs of a word]`."""
        shared = shared.expand(runs, -1, groups)
        repeated = shared.repeat_interleave(length * outputs_per_word // shared.shape[1], 1)
        return repeated.permute(2, 0, 1).reshape(groups, 1, runs, length, outputs_per_word)

    product = ((sums - totals * spread(zeros)) * spread(scale.float())).sum(0)
    others = product.new_zeros(summands - 1, *product.shape)
    return torch.cat([product.unsqueeze(0), others])


def _integers(words: Tensor, count: int, interleaved: bool) -> Tensor:
    """The levels of words, `[..., count]`, from 0 on; or what is no word, as it is."""
    if words.dtype is not torch.int32:
        return words.unsqueeze(-1)
    place = torch.arange(count, dtype=torch.int32, device=words.device)
    if interleaved:
        place = place // 2 + place % 2 * (count // 2)
    bits = WORD // count
    return words.unsqueeze(-1) >> place * bits & (1 << bits) - 1


def _shape_of(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    outputs_per_word: int,
    offset: int,
    zero_wraps: bool,
    interleaved: bool,
    summands: int,
) -> Tensor:
    shape = summands, input.shape[0], weight.shape[0], weight.shape[1], outputs_per_word
    return input.new_empty(shape, dtype=torch.float32)


def _flops(input: Any, weight: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Two for each multiply-add."""
    _, rows, *outputs = out_shape
    return 2 * math.prod(map(int, (rows, *outputs, *input[1:])))


QUANTIZED_PRODUCT = defined(
    "quantized_product(Tensor input, Tensor weight, Tensor scale, Tensor? zero, "
    "int outputs_per_word, int offset, bool zero_wraps, bool interleaved, int summands) -> Tensor",
    _on_host,
    _shape_of,
    flops=_flops,
    cuda=multiply,
)
