"""The product of few rows with a quantized weight, as a kernel of Triton.

Each program takes some outputs and a part of the inputs. It reads tiles of words with levels, which
become numbers in the registers that they are read to. One row is multiplied by them there; several
rows by tensor cores, for which levels are exact in 16 bits. Sums over inputs of one scale are
multiplied by the scale. Programs that have parts of the inputs of the same outputs give summands of
the result. Whoever takes it adds them up, so sums do not depend on which program is first.

A GPU reads 4 bits of a weight in less time than it takes for five instructions on each level, so
they are few. An integer behind the mantissa of a power of two is a float32 of two bit operations
in one instruction: its own bits, where they are, and those of the power whose last bit has that
place. The power is taken away with the zero point. A float8_e4m3fn is a float32 by its bits alone,
but for a power of two and for NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None

MOST = 16
"""The most rows: those of the smallest product of tensor cores."""
LEAST = 16
"""The fewest inputs of a tile, for such a product."""
BYTES = 4
"""Levels of a byte in a word."""
FLOAT8 = (8, 9)
"""The compute capability from which on devices compute with float8_e4m3fn."""
REGISTERS = 128
"""Of a thread that multiplies one row, at most, so that as many programs read at one time."""
POWER = 0x4B000000
"""2**23 as float32. The kernel has it as an argument: of two constants in one operation, a compiler
makes two instructions."""


@dataclass(frozen=True)
class Tiles:
    """How programs share a product; sizes are powers of two.

    Attributes:
        units: outputs of a program, or words with levels of several outputs.
        inputs: of a tile.
        inner: tiles of a step, whose sums are multiplied by a scale together.
        warps: of a program.
        steps: the fewest of a program.
        programs: as many as keep the memory of a device busy.
    """

    units: int
    inputs: int
    inner: int
    warps: int
    steps: int
    programs: int = 1024


ROW, ROW_OF_WORDS = Tiles(64, 128, 1, 2, 2), Tiles(16, 16, 8, 2, 2)
"""For one row; the second where a word has levels of several outputs."""
ROWS, ROWS_OF_WORDS = Tiles(64, 128, 4, 8, 2), Tiles(8, 64, 4, 8, 8)
"""For several rows."""
MOST_SUMMANDS = 32


def has_kernel(device: torch.device, levels: torch.dtype) -> bool:
    """True if the kernel runs on a device, with levels of a type."""
    if triton is None or device.type != "cuda":
        return False
    return levels is not torch.float8_e4m3fn or has_float8(device)


def has_float8(device: torch.device) -> bool:
    """True if a device of CUDA computes with float8_e4m3fn.

    AMD's have compute capabilities, too, which are other numbers. Many of them have e4m3fnuz, whose
    bits stand for other numbers, so ROCm is left out.
    """
    return not torch.version.hip and torch.cuda.get_device_capability(device) >= FLOAT8


def tiles_of(rows: int, group: int, is_only: bool, are_words_of_outputs: bool) -> Tiles | None:
    """The tiles of a product; None if none divide the inputs of a scale.

    Args:
        rows: of the input.
        group: inputs that share a scale.
        is_only: whether these are all. Then the last tile may be ragged.
        are_words_of_outputs: whether a word has levels of several outputs.
    """
    if rows == 1:
        most = ROW_OF_WORDS if are_words_of_outputs else ROW
    else:
        most = ROWS_OF_WORDS if are_words_of_outputs else ROWS
    if is_only:
        return most
    size = group & -group  # the largest power of two that divides it
    tile = min(size, most.inputs)
    return (
        replace(most, inputs=tile, inner=min(size // tile, most.inner)) if tile >= LEAST else None
    )


def summands_of(tiles: Tiles, inputs: int, units: int) -> int:
    """How many programs share the inputs of the same outputs.

    Args:
        tiles: of the product.
        inputs: of the weight.
        units: outputs, or words with levels of several of them.
    """
    programs = -(-units // tiles.units)
    steps = max(inputs // (tiles.inputs * tiles.inner), 1)
    most = min(steps // tiles.steps, MOST_SUMMANDS)
    counts = [count for count in range(1, most + 1) if steps % count == 0] or [1]
    return next((count for count in counts if programs * count >= tiles.programs), counts[-1])


def has_words(weight: Tensor) -> bool:
    """True if the levels of a weight are words, or bytes of which four are one behind the other.

    Args:
        weight: [..., units], of any strides.
    """
    *strides, last = weight.stride()
    are_whole = not any(number % BYTES for number in (weight.shape[-1], *strides))
    return weight.dtype is torch.int32 or (last == 1 and are_whole)


def multiply(
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
    """`quantized_product` on a device.

    Raises:
        ValueError: levels of a byte do not lie one behind the other.
    """
    rows, groups, units, inputs_per_word = input.shape
    runs, length = weight.shape[:2]
    shape = summands, rows, runs, length, outputs_per_word
    if not (input.numel() and weight.numel()):  # of a rank that has no piece
        return input.new_zeros(shape, dtype=torch.float32)
    group, is_packed = units * inputs_per_word, weight.dtype is torch.int32
    inputs, are_of_outputs = groups * group, outputs_per_word > 1
    words = weight.flatten(2, 3).flatten(0, 1)
    tiles = tiles_of(rows, group, groups == 1, are_of_outputs)
    if tiles is None or not has_words(words):
        raise ValueError(
            f"a kernel takes no weight of shape {[*weight.shape]} in {weight.stride()}"
        )
    if not is_packed:
        words = words.clone() if words.storage_offset() % BYTES else words
        words = words.view(torch.int32)
    scales = scale.flatten(0, 1)
    zeros = scales if zero is None else zero.flatten(0, 1)
    several = triton.cdiv(inputs, tiles.inputs * tiles.inner * summands)
    outputs = len(words) * outputs_per_word
    out = input.new_empty(shape, dtype=torch.float32)
    _multiply[(triton.cdiv(len(words), tiles.units), summands)](
        input.contiguous(), words, scales, zeros, out,
        rows, len(words), outputs, inputs,
        *words.stride(), *scales.stride(), *zeros.stride(), POWER,
        ROWS=1 if rows == 1 else MOST, BLOCK=tiles.units, TILE=tiles.inputs, INNER=tiles.inner,
        GROUP=group, LEVELS=max(outputs_per_word, inputs_per_word) if is_packed else BYTES,
        IS_FLOAT=weight.dtype is torch.float8_e4m3fn, IS_SIGNED=weight.dtype is torch.int8,
        OF_OUTPUTS=are_of_outputs, INTERLEAVED=interleaved,
        PER_SCALE=outputs // len(scales), PER_ZERO=outputs // len(zeros),
        HAS_ZERO=zero is not None, IS_ZERO_PACKED=zeros.dtype is torch.int32, OFFSET=offset,
        WRAPS=zero_wraps, SEVERAL=several,
        IS_RAGGED=several * summands * tiles.inputs * tiles.inner != inputs, num_warps=tiles.warps,
        maxnreg=REGISTERS if rows == 1 else None,
    )  # fmt: skip
    return out


if triton is not None:

    @triton.jit
    def _behind_power(
        words, power, INDEX: tl.constexpr, COUNT: tl.constexpr, INTERLEAVED: tl.constexpr
    ):
        """One of the levels of each word, plus the power of two whose last bit has its place."""
        bits: tl.constexpr = 32 // COUNT
        half: tl.constexpr = INDEX // 2 + INDEX % 2 * (COUNT // 2)
        place: tl.constexpr = (half if INTERLEAVED else INDEX) * bits
        if place >= 16:
            words = (words.to(tl.uint32, bitcast=True) >> 16).to(tl.int32, bitcast=True)
        mask: tl.constexpr = ((1 << bits) - 1) << place % 16
        sums = (words & mask) | (power - (place % 16 << 23))
        return sums.to(tl.float32, bitcast=True)

    # Levels of a word in dimensions of two, so that they stay in the registers of its thread.

    @triton.jit
    def _two(
        words, power, FIRST: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr,
        INTERLEAVED: tl.constexpr,
    ):  # fmt: skip
        return tl.join(
            _behind_power(words, power, FIRST, COUNT, INTERLEAVED),
            _behind_power(words, power, FIRST + STEP, COUNT, INTERLEAVED),
        )

    @triton.jit
    def _four(
        words, power, FIRST: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr,
        INTERLEAVED: tl.constexpr,
    ):  # fmt: skip
        return tl.join(
            _two(words, power, FIRST, 2 * STEP, COUNT, INTERLEAVED),
            _two(words, power, FIRST + STEP, 2 * STEP, COUNT, INTERLEAVED),
        )

    @triton.jit
    def _eight(
        words, power, FIRST: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr,
        INTERLEAVED: tl.constexpr,
    ):  # fmt: skip
        return tl.join(
            _four(words, power, FIRST, 2 * STEP, COUNT, INTERLEAVED),
            _four(words, power, FIRST + STEP, 2 * STEP, COUNT, INTERLEAVED),
        )

    @triton.jit
    def _unpacked(words, power, COUNT: tl.constexpr, INTERLEAVED: tl.constexpr):
        """The levels of words, [..., 2, 2, ...], of which the last dimensions are COUNT."""
        if COUNT == 4:
            levels = _four(words, power, 0, 1, COUNT, INTERLEAVED)
        elif COUNT == 8:
            levels = _eight(words, power, 0, 1, COUNT, INTERLEAVED)
        else:
            levels = tl.join(
                _eight(words, power, 0, 2, COUNT, INTERLEAVED),
                _eight(words, power, 1, 2, COUNT, INTERLEAVED),
            )
        return levels

    @triton.jit
    def _float8(words, INDEX: tl.constexpr):
        """A float8_e4m3fn of each word, times 2**-120; of NaN another number."""
        top = words << (24 - 8 * INDEX)
        return ((top >> 4) & -0x78100000).to(tl.float32, bitcast=True)

    @triton.jit
    def _either(words, others):
        return words | others

    @triton.jit
    def _nan_marks(words, BLOCK: tl.constexpr, WIDE: tl.constexpr):
        """A word for each four, which a thread reads at once: one register and not four.

        Its bits in NAN are set where a float8_e4m3fn of the four is NaN.
        """
        marks = (words & 0x7F7F7F7F) + 0x01010101
        return tl.reduce(tl.reshape(marks, [BLOCK, WIDE // 4, 4]), 2, _either)

    @triton.jit
    def _points(
        zeros, unit, is_unit, group, zero_o, zero_g, power, BLOCK: tl.constexpr,
        LEVELS: tl.constexpr, OF_OUTPUTS: tl.constexpr, IS_ZERO_PACKED: tl.constexpr,
        INTERLEAVED: tl.constexpr, PER_ZERO: tl.constexpr, HAS_ZERO: tl.constexpr,
        OFFSET: tl.constexpr, WRAPS: tl.constexpr,
    ):  # fmt: skip
        """The zero points of levels, float32 [BLOCK, LEVELS], each plus the power of its level."""
        none = tl.zeros([BLOCK], tl.int32)
        powers = tl.reshape(_unpacked(none, power, LEVELS, INTERLEAVED), [BLOCK, LEVELS])
        if not HAS_ZERO:
            return powers + OFFSET
        place = zeros + unit // PER_ZERO * zero_o + group * zero_g
        if OF_OUTPUTS:
            place = zeros + unit * zero_o + group * zero_g
        stored = tl.load(place, mask=is_unit, other=0)
        if OF_OUTPUTS:
            points = tl.reshape(_unpacked(stored, power, LEVELS, INTERLEAVED), [BLOCK, LEVELS])
            if OFFSET != 0:
                points += OFFSET
                if WRAPS:
                    size: tl.constexpr = 1 << 32 // LEVELS
                    points = tl.where(points < powers + size, points, points - size)
            return points
        if IS_ZERO_PACKED:
            bits: tl.constexpr = 32 // PER_ZERO
            points = (stored >> unit % PER_ZERO * bits & ((1 << bits) - 1)) + OFFSET
            if WRAPS:
                points = points & ((1 << bits) - 1)
            # A conversion to float32 would take longer.
            numbers = (points | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
        else:
            numbers = stored.to(tl.float32) + OFFSET
        return powers + numbers[:, None]

    @triton.jit
    def _inputs(input, at, inputs, IS_RAGGED: tl.constexpr):
        """Inputs of one row, float32."""
        if IS_RAGGED:
            return tl.load(input + at, mask=at < inputs, other=0.0).to(tl.float32)
        return tl.load(input + at).to(tl.float32)

    @triton.jit
    def _multiply(
        input, words, scales, zeros, out, rows, units, outputs, inputs,
        word_o, word_i, scale_o, scale_g, zero_o, zero_g, power,
        ROWS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, INNER: tl.constexpr,
        GROUP: tl.constexpr, LEVELS: tl.constexpr, IS_FLOAT: tl.constexpr,
        IS_SIGNED: tl.constexpr, OF_OUTPUTS: tl.constexpr, INTERLEAVED: tl.constexpr,
        PER_SCALE: tl.constexpr, PER_ZERO: tl.constexpr, HAS_ZERO: tl.constexpr,
        IS_ZERO_PACKED: tl.constexpr, OFFSET: tl.constexpr, WRAPS: tl.constexpr,
        SEVERAL: tl.constexpr, IS_RAGGED: tl.constexpr,
    ):  # fmt: skip
        # A tile of levels is [BLOCK, WIDE, LEVELS]: units of outputs, words of inputs, and their
        # levels, which are of COUNT outputs.
        WIDE: tl.constexpr = TILE if OF_OUTPUTS else TILE // LEVELS
        COUNT: tl.constexpr = LEVELS if OF_OUTPUTS else 1
        # Levels of float8 are 2**-120 of their numbers, so they are multiplied by 2**60 twice: the
        # inputs, lest sums have no bits left, and the sums.
        SHIFT: tl.constexpr = 2.0**60 if IS_FLOAT else 1.0
        NAN: tl.constexpr = -0x7F7F7F80
        unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        is_unit = unit < units
        output = unit[:, None] * COUNT + tl.arange(0, COUNT)[None, :]
        row = tl.arange(0, ROWS)
        if ROWS > 1:
            total = tl.zeros([ROWS, BLOCK * COUNT], tl.float32)
        elif OF_OUTPUTS:
            total = tl.zeros([BLOCK, WIDE, COUNT], tl.float32)
        else:
            total = tl.zeros([BLOCK, WIDE], tl.float32)
        if IS_FLOAT:
            marks = tl.zeros([BLOCK, WIDE // 4], tl.int32)
        last = inputs if OF_OUTPUTS else inputs // LEVELS
        for index in range(SEVERAL):
            step = tl.program_id(1) * SEVERAL + index
            group = step * (TILE * INNER) // GROUP
            if IS_RAGGED:  # there may be no such step, and its inputs are zeros
                group = tl.minimum(group, inputs // GROUP - 1)
            place = scales + output // PER_SCALE * scale_o + group * scale_g
            scale = tl.load(place, mask=is_unit[:, None], other=0.0).to(tl.float32)
            if not IS_FLOAT:
                points = _points(
                    zeros, unit, is_unit, group, zero_o, zero_g, power, BLOCK, LEVELS,
                    OF_OUTPUTS, IS_ZERO_PACKED, INTERLEAVED, PER_ZERO, HAS_ZERO,
                    OFFSET + 128 if IS_SIGNED else OFFSET, WRAPS,
                )  # fmt: skip
            sums = tl.zeros_like(total)
            for inner in tl.static_range(INNER):
                tile = step * INNER + inner
                wide = tile * WIDE + tl.arange(0, WIDE)
                here = is_unit[:, None]
                if IS_RAGGED:
                    here = here & (wide < last)[None, :]
                place = words + unit[:, None] * word_o + wide[None, :] * word_i
                packed = tl.load(place, mask=here, other=0)
                if IS_FLOAT:
                    numbers = tl.join(
                        tl.join(_float8(packed, 0), _float8(packed, 2)),
                        tl.join(_float8(packed, 1), _float8(packed, 3)),
                    )
                    numbers = tl.reshape(numbers, [BLOCK, WIDE, LEVELS])
                    marks |= _nan_marks(packed, BLOCK, WIDE)
                else:
                    if IS_SIGNED:  # from -128 on
                        packed = packed ^ -0x7F7F7F80
                    numbers = _unpacked(packed, power, LEVELS, INTERLEAVED)
                    numbers = tl.reshape(numbers, [BLOCK, WIDE, LEVELS]) - points[:, None, :]
                if ROWS > 1:
                    at = tile * TILE + tl.arange(0, TILE)
                    here = (row < rows)[:, None]
                    if IS_RAGGED:
                        here = here & (at < inputs)[None, :]
                    x = tl.load(input + row[:, None] * inputs + at[None, :], mask=here, other=0.0)
                    numbers *= SHIFT * SHIFT
                    if OF_OUTPUTS:
                        numbers = tl.permute(numbers, (1, 0, 2))
                        matrix = tl.reshape(numbers, [TILE, BLOCK * COUNT])
                    else:
                        matrix = tl.trans(tl.reshape(numbers, [BLOCK, TILE]))
                    sums = tl.dot(x, matrix.to(x.dtype), sums, input_precision="ieee")
                elif OF_OUTPUTS:
                    x = _inputs(input, wide, inputs, IS_RAGGED)
                    sums += numbers * x[None, :, None]
                else:
                    at = wide[:, None] * LEVELS + tl.arange(0, LEVELS)[None, :]
                    x = _inputs(input, at, inputs, IS_RAGGED) * SHIFT
                    sums += tl.sum(numbers * x[None, :, :], 2)
            if ROWS > 1:
                total += sums * tl.reshape(scale, [1, BLOCK * COUNT])
            elif OF_OUTPUTS:
                total += sums * scale[:, None, :]
            else:
                total += sums * scale
        if ROWS == 1:
            total = tl.sum(total, 1) * SHIFT
        if IS_FLOAT:
            are_nan = tl.max((marks & NAN != 0).to(tl.int32), 1) > 0
            if ROWS > 1:
                are_nan = are_nan[None, :]
            total = tl.where(are_nan, float("nan"), total)
        part = out + tl.program_id(1) * rows * outputs
        if ROWS > 1:
            column = tl.program_id(0) * (BLOCK * COUNT) + tl.arange(0, BLOCK * COUNT)
            is_there = (row < rows)[:, None] & (column < outputs)[None, :]
            tl.store(part + row[:, None] * outputs + column[None, :], total, mask=is_there)
        elif OF_OUTPUTS:
            tl.store(part + output, total, mask=is_unit[:, None])
        else:
            tl.store(part + unit, total, mask=is_unit)
