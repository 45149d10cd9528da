"""Keys and values in 8 bits: float8 of 4 bits of exponent (e4m3), with a scale for each vector.

The vector of a head of a token has a scale of its own, a power of two, so that its largest number
is above half of float8's largest. A power of two moves the exponent alone, so a number keeps the 4
significant bits of float8, and the relative error is at most 1/16 in all numbers that are at least
2**-14 times as large as the largest. A vector is written once, and nothing that was written before
changes, as it would where a block of tokens shared a scale. The exponent takes a byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 448.0
"""The largest number of float8_e4m3fn."""
BIAS = 127
"""The exponent byte of a scale of 1, as float32 has it."""
MANTISSA = 23
"""Bits of float32 behind its exponent."""


def quantize(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Write vectors in 8 bits.

    Args:
        vectors: [..., width].

    Returns:
        Float8 as bytes, uint8 [..., width], and the exponents of scales, uint8 [...].
    """
    numbers = vectors.float()
    most = numbers.abs().amax(-1)
    exponents = torch.ceil(torch.log2(most / MOST)).clamp(1 - BIAS, BIAS - 1).to(torch.int32)
    shrunk = numbers * _power(-exponents)[..., None]
    levels = shrunk.clamp(-MOST, MOST).to(torch.float8_e4m3fn)
    return levels.view(torch.uint8), (exponents + BIAS).to(torch.uint8)


def dequantize(levels: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Read vectors, as `quantize` has written them."""
    numbers = levels.view(torch.float8_e4m3fn).float()
    return (numbers * _power(exponents.to(torch.int32) - BIAS)[..., None]).to(dtype)


def _power(exponents: Tensor) -> Tensor:
    """Powers of two, exactly: float32 is made of its bits."""
    return ((exponents + BIAS) << MANTISSA).view(torch.float32)
