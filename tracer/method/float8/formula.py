"""Products of float8: scales, casts, and the product itself.

A tensor is scaled so that its greatest magnitude is the greatest number of the type, and cast. The
scale is `largest / max(amax, 1e-12)`, computed in float64 and rounded to float32. The product is
summed in float32, multiplied by both inverse scales, and rounded to the result's type. These are
`amax_to_scale` and `to_fp8_saturated` of `torchao/float8/float8_utils.py`, and what
`torch._scaled_mm` computes. On hosts the product is a float32 product of the casts; on CUDA it is
`torch._scaled_mm`. The two differ by the rounding of sums alone. ROCm computes as hosts do: many
devices of AMD have e4m3fnuz, whose bits stand for other numbers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.flop_counter import register_flop_formula

from ...values.float8_layers import ALIGNMENT

_LEAST = 1e-12
"""The least magnitude that a scale is computed of, so that a tensor of zeros has a scale."""

_LIBRARY = torch.library.Library("cg", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "float8_mm(Tensor left, Tensor right, Tensor left_scale, Tensor right_scale, "
    "ScalarType dtype, bool fast) -> Tensor"
)


def scales(value: Tensor, dtype: torch.dtype, by_row: bool) -> Tensor:
    """The factors that scale a matrix to float8.

    Args:
        value: `[m, k]`, of which a product contracts `k`.
        dtype: the float8 type.
        by_row: whether each row has its own factor, which is a power of 2.

    Returns:
        float32 `[m, 1]` by row, else `[]`.
    """
    if not by_row:
        return scales_of(value.abs().amax() if value.numel() else value.new_zeros(()), dtype)
    is_empty = not value.shape[1]
    greatest = value.new_zeros(len(value), 1) if is_empty else value.abs().amax(1, keepdim=True)
    scale = scales_of(greatest, dtype)
    return torch.exp2(torch.floor(torch.log2(scale)))


def scales_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The float32 factors that make greatest magnitudes the greatest number of a type."""
    return (torch.finfo(dtype).max / amax.double().clamp(min=_LEAST)).float()


def quantised(value: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix, scaled and cast to float8; what is too large becomes the largest number."""
    largest = torch.finfo(dtype).max
    return (value.float() * scale).clamp(-largest, largest).to(dtype)


def turned(value: Tensor) -> Tensor:
    """The transposed matrix, in memory of its own."""
    return value.t().contiguous()


def product(
    left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype, fast: bool
) -> Tensor:
    """`left @ right.T`, of matrices and their scales.

    Args:
        left: float8 `[m, k]` with its scales.
        right: float8 `[n, k]` with its scales.
        dtype: the type of the result.
        fast: whether CUDA's kernel may accumulate in fewer bits than float32.

    Returns:
        `[m, n]`. With scales by row, the product is rounded to bfloat16, then cast.
    """
    by_row = left[1].dim() == 2
    product: Tensor = torch.ops.cg.float8_mm(
        left[0],
        right[0],
        left[1].reciprocal(),
        right[1].reciprocal(),
        torch.bfloat16 if by_row else dtype,
        fast,
    )
    return product.to(dtype)


def _float8_mm(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """`left @ right.T`; the scales are those by which to multiply the product."""
    if left.is_cuda and not torch.version.hip:
        return _scaled_mm(left, right, left_scale, right_scale, dtype, fast)
    sums = _widened(left) @ _widened(right).t()
    return (sums * (left_scale * right_scale.t())).to(dtype)


def _widened(value: Tensor) -> Tensor:
    """A float8 matrix as float32. On hosts a table is ten times as fast as the cast of e4m3."""
    if value.device.type != "cpu" or value.dtype != torch.float8_e4m3fn:
        return value.float()
    bits = value.reshape(-1).view(torch.uint8).int()
    return _E4M3_VALUES.index_select(0, bits).view(value.shape)


_E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""The numbers of e4m3, by their bits."""


def _scaled_mm(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """`torch._scaled_mm`, for pieces of all sizes: zeros fill them up to multiples of 16."""
    (rows, inner), columns = left.shape, len(right)
    if not (rows and inner and columns):
        return left.new_zeros(rows, columns, dtype=dtype)
    more = -inner % ALIGNMENT, -columns % ALIGNMENT
    if more[0]:
        left = _padded(left, 0, more[0])
    if more[0] or more[1]:
        right = _padded(right, more[1], more[0])
    if more[1] and right_scale.dim():
        right_scale = pad(right_scale, (0, 0, 0, more[1]), value=1.0)
    result = torch._scaled_mm(
        left.contiguous(),
        right.contiguous().t(),
        left_scale.contiguous(),
        right_scale.t().contiguous(),
        out_dtype=dtype,
        use_fast_accum=fast,
    )
    return result[:, :columns].contiguous() if more[1] else result


def _padded(value: Tensor, rows: int, columns: int) -> Tensor:
    """A float8 matrix with zeros behind its rows and columns."""
    bits = pad(value.contiguous().view(torch.uint8), (0, columns, 0, rows))
    return bits.view(value.dtype)


_LIBRARY.impl("float8_mm", _float8_mm, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake(
    "cg::float8_mm",
    lambda left, right, left_scale, right_scale, dtype, fast: left.new_empty(
        left.shape[0], right.shape[0], dtype=dtype
    ),
    lib=_LIBRARY,
)

FLOAT8_MM = torch.ops.cg.float8_mm.default


@register_flop_formula(torch.ops.cg.float8_mm)
def _flops(left: Any, right: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Two for each multiply-add."""
    return 2 * math.prod(map(int, (*left, right[0])))
