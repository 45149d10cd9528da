"""The product of several rows with a quantized weight, as a kernel of Triton.

Each program takes some outputs and a part of the inputs, as in `quantized_kernel.py`. It makes
numbers of the type of the inputs from levels, which is exact, and multiplies them on tensor cores,
whose sums are float32. Sums over inputs of one scale are multiplied by the scale.

Levels of a word become numbers in pairs: behind the mantissa of a power of two, an integer is a
number of 16 bits by two bit operations on its word. One instruction takes the power and the zero
point from both. Bytes are converted by the device, which knows their NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None

ROWS = 16
"""Of the smallest product of tensor cores that takes weights as its rows."""


@dataclass(frozen=True)
class Halves:
    """How two levels of a word become numbers of 16 bits at once; each constant is of both halves.

    Attributes:
        dtype: of the numbers.
        mask: the bits of the lowest level of a half.
        power: of two, whose last bit of the mantissa is one.
        point: minus the power. A zero point is added to its bits.
        one: the number.
    """

    dtype: torch.dtype
    mask: int
    power: int
    point: int
    one: int

    @staticmethod
    def of(inputs: torch.dtype, bits: int) -> Halves:
        """For inputs of a type. A bfloat16 has no room for 8 bits behind a power of two."""
        if inputs is torch.bfloat16 and bits < 8:
            dtype, power, one = torch.bfloat16, 0x4300, 0x3F80  # 128
        else:
            dtype, power, one = torch.float16, 0x6400, 0x3C00  # 1024
        numbers = ((1 << bits) - 1, power, power | 0x8000, one)
        return Halves(dtype, *map(_of_both_halves, numbers))


def _of_both_halves(bits: int) -> int:
    word = bits << 16 | bits
    return word - (1 << 32) if word >> 31 else word


def has_assembly() -> bool:
    """True on NVIDIA's devices, and false in Triton's interpreter."""
    return isinstance(multiply_rows, triton.JITFunction) and not torch.version.hip


if triton is not None:

    @triton.jit
    def _level(words, mask, INDEX: tl.constexpr, COUNT: tl.constexpr):
        """One of the levels of both halves of words."""
        if INDEX == 0:
            return words & mask
        shifted = words.to(tl.uint32, bitcast=True) >> INDEX * (32 // COUNT)
        return shifted.to(tl.int32, bitcast=True) & mask

    # Levels of a word in dimensions of two, so that they stay in the registers of its thread.

    @triton.jit
    def _two(words, mask, FIRST: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr):
        return tl.join(_level(words, mask, FIRST, COUNT), _level(words, mask, FIRST + STEP, COUNT))

    @triton.jit
    def _four(words, mask, FIRST: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr):
        return tl.join(
            _two(words, mask, FIRST, 2 * STEP, COUNT),
            _two(words, mask, FIRST + STEP, 2 * STEP, COUNT),
        )

    @triton.jit
    def _levels(words, mask, COUNT: tl.constexpr):
        """The levels of both halves of words, int32 [..., COUNT / 2] in dimensions of two."""
        if COUNT == 4:
            levels = _two(words, mask, 0, 1, COUNT)
        elif COUNT == 8:
            levels = _four(words, mask, 0, 1, COUNT)
        else:
            levels = tl.join(_four(words, mask, 0, 2, COUNT), _four(words, mask, 1, 2, COUNT))
        return levels

    @triton.jit
    def _half(words, HALF: tl.constexpr, IS_WIDE: tl.constexpr):
        bits = (words >> 16 * HALF).to(tl.int16)
        return bits.to(tl.float16 if IS_WIDE else tl.bfloat16, bitcast=True)

    @triton.jit
    def _sums(words, points, one, IS_WIDE: tl.constexpr, HAS_ASSEMBLY: tl.constexpr):
        """Sums of the numbers in both halves of words; [..., 2], which are exact."""
        if HAS_ASSEMBLY:  # a compiler would take halves apart, and have an instruction for each
            if IS_WIDE:
                sums = tl.inline_asm_elementwise(
                    "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [words, one, points],
                    dtype=tl.int32, is_pure=True, pack=1,
                )  # fmt: skip
            else:
                sums = tl.inline_asm_elementwise(
                    "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [words, one, points],
                    dtype=tl.int32, is_pure=True, pack=1,
                )  # fmt: skip
            return tl.join(_half(sums, 0, IS_WIDE), _half(sums, 1, IS_WIDE))
        low = _half(words, 0, IS_WIDE).to(tl.float32) + _half(points, 0, IS_WIDE).to(tl.float32)
        high = _half(words, 1, IS_WIDE).to(tl.float32) + _half(points, 1, IS_WIDE).to(tl.float32)
        return tl.join(low, high).to(tl.float16 if IS_WIDE else tl.bfloat16)

    @triton.jit
    def _points(
        zeros, unit, is_unit, group, zero_o, zero_g,
        ARE_WORDS: tl.constexpr, IS_ZERO_PACKED: tl.constexpr, PER_ZERO: tl.constexpr,
        HAS_ZERO: tl.constexpr, OFFSET: tl.constexpr, WRAPS: tl.constexpr,
    ):  # fmt: skip
        """The zero points of units, int32 [units], of both halves where levels are of a word."""
        if not HAS_ZERO:
            return tl.zeros_like(unit) + OFFSET
        if ARE_WORDS:
            return tl.load(zeros + unit * zero_o + group * zero_g, mask=is_unit, other=0)
        place = zeros + unit // PER_ZERO * zero_o + group * zero_g
        points = tl.load(place, mask=is_unit, other=0)
        if IS_ZERO_PACKED:
            bits: tl.constexpr = 32 // PER_ZERO
            points = (points >> unit % PER_ZERO * bits & (1 << bits) - 1) + OFFSET
            return points & (1 << bits) - 1 if WRAPS else points
        return points.to(tl.int32) + OFFSET

    @triton.jit
    def multiply_rows(
        input, levels, scales, zeros, out, rows, units, outputs, inputs,
        level_o, level_i, scale_o, scale_g, zero_o, zero_g, mask, power, one,
        POINT: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
        TILE: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr, PER_WORD: tl.constexpr,
        IS_PACKED: tl.constexpr, INTERLEAVED: tl.constexpr, PER_SCALE: tl.constexpr,
        PER_ZERO: tl.constexpr, HAS_ZERO: tl.constexpr, IS_ZERO_PACKED: tl.constexpr,
        WRAPS: tl.constexpr, SEVERAL: tl.constexpr, IS_RAGGED: tl.constexpr,
        IS_FLOAT: tl.constexpr, IS_WIDE: tl.constexpr, HAS_ASSEMBLY: tl.constexpr,
    ):  # fmt: skip
        # A tile is [units of outputs, units of inputs]. A unit is a level, or a word with levels of
        # several outputs or inputs, and those of its halves are one behind the other in `numbers`.
        NOTHING: tl.constexpr = 0.0 if IS_FLOAT else 0
        HALF: tl.constexpr = COUNT // 2
        PER_INPUT: tl.constexpr = COUNT if IS_PACKED and PER_WORD == 1 else 1
        WIDE: tl.constexpr = TILE // PER_INPUT
        OUTPUTS: tl.constexpr = BLOCK * PER_WORD
        unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        is_unit = unit < units
        column = tl.arange(0, OUTPUTS)
        if IS_PACKED and PER_WORD == 1:
            # A thread reads words of outputs that lie side by side, and writes their numbers to
            # shared memory. Threads write at one time what is in different banks if each of its
            # outputs is in a quarter of the tile.
            column = column % (BLOCK // 4) * 4 + column // (BLOCK // 4)
        level = column % PER_WORD
        if PER_WORD > 1 and not INTERLEAVED:
            level = level % 2 * HALF + level // 2
        output = tl.program_id(0) * OUTPUTS + column // PER_WORD * PER_WORD + level
        is_output = output < outputs
        row = tl.arange(0, ROWS)
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for index in range(SEVERAL):
            step = tl.program_id(1) * SEVERAL + index
            group = step * TILE // GROUP
            if IS_RAGGED:  # there may be no such step, and its inputs are zeros
                group = tl.minimum(group, inputs // GROUP - 1)
            at = step * TILE + tl.arange(0, TILE)
            wide = step * WIDE + tl.arange(0, WIDE)
            here, stands = (row < rows)[:, None], is_unit[:, None]
            if IS_RAGGED:
                here = here & (at < inputs)[None, :]
                stands = stands & (wide < inputs // PER_INPUT)[None, :]
            x = tl.load(input + row[:, None] * inputs + at[None, :], mask=here, other=0.0)
            if PER_INPUT > 1 and not INTERLEAVED:
                x = tl.permute(tl.reshape(x, [ROWS, WIDE, 2, HALF]), (0, 1, 3, 2))
                x = tl.reshape(x, [ROWS, TILE])
            stored = tl.load(
                levels + unit[:, None] * level_o + wide[None, :] * level_i,
                mask=stands,
                other=NOTHING,
            )
            if IS_FLOAT:
                numbers = stored.to(tl.float32).to(x.dtype)  # by way of float32 they are pairs
            else:
                points = _points(
                    zeros, unit, is_unit, group, zero_o, zero_g, PER_WORD > 1, IS_ZERO_PACKED,
                    PER_ZERO, HAS_ZERO, OFFSET, WRAPS,
                )  # fmt: skip
                if not IS_PACKED:
                    numbers = (stored.to(tl.int32) - points[:, None]).to(x.dtype)
                else:
                    if PER_WORD > 1 and HAS_ZERO:
                        points = tl.reshape(_levels(points, mask, COUNT), [BLOCK, 1, HALF])
                        points += OFFSET * 0x10001
                        points = points & mask if WRAPS else points
                    else:
                        points = (points * 0x10001)[:, None, None]
                    words = tl.reshape(_levels(stored, mask, COUNT), [BLOCK, WIDE, HALF]) | power
                    numbers = _sums(words, points | POINT, one, IS_WIDE, HAS_ASSEMBLY)
                    if PER_WORD > 1:
                        numbers = tl.permute(tl.reshape(numbers, [BLOCK, WIDE, COUNT]), (0, 2, 1))
                    else:
                        numbers = tl.permute(tl.reshape(numbers, [BLOCK // 4, 4, TILE]), (1, 0, 2))
                    numbers = tl.reshape(numbers, [OUTPUTS, TILE]).to(x.dtype)
            place = scales + output // PER_SCALE * scale_o + group * scale_g
            scale = tl.load(place, mask=is_output, other=0.0).to(tl.float32)
            total += tl.dot(numbers, tl.trans(x)) * scale[:, None]
        part = out + tl.program_id(1) * rows * outputs
        is_there = is_output[:, None] & (row < rows)[None, :]
        tl.store(part + row[None, :] * outputs + output[:, None], total, mask=is_there)
