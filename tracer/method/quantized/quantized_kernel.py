"""The product of few rows with a quantized weight, as a kernel of Triton.

Each program takes some outputs and a part of the inputs. It reads tiles of levels, which become
numbers in the registers that they are read to. One row is multiplied by them there; several rows by
tensor cores, for which levels are exact in 16 bits. Sums over inputs of one scale are multiplied by
the scale. Programs that have parts of the inputs of the same outputs give summands of the result.
Whoever takes it adds them up, so sums do not depend on which program is first.
"""

from __future__ import annotations

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
INPUTS, INPUTS_OF_WORDS = 128, 64
"""The most inputs of a tile; the second where a word has levels of several outputs."""
OUTPUTS, WORDS = 64, 8
"""The outputs of a tile, or the words with levels of several outputs."""
INNER = 4
"""The most tiles whose sums are multiplied by a scale together."""
WARPS = 8
"""Of a program. A tile has fewer scales and inputs than threads, so that each thread reads those
that it needs: else Triton would hand them on through shared memory."""
BYTES = 16
"""Levels of a byte that are one unit: what a thread reads at once."""
PROGRAMS = 1024
"""As many as keep the memory of a device busy."""
STEPS, STEPS_OF_WORDS = 2, 8
"""The fewest steps of a program. A step has the tiles of one scale."""
MOST_SUMMANDS = 16
FLOAT8 = (8, 9)
"""The compute capability from which on Triton converts float8_e4m3fn."""


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


def tiles_of(group: int, is_only: bool, are_words_of_outputs: bool) -> tuple[int, int]:
    """The inputs of a tile, and the tiles of a step.

    Both are powers of two, and together divide the inputs of a scale, unless all inputs share one.
    The first is 0 if there is no such tile.

    Args:
        group: inputs that share a scale.
        is_only: whether these are all.
    """
    most = INPUTS_OF_WORDS if are_words_of_outputs else INPUTS
    if is_only:
        return most, INNER
    size = group & -group  # the largest power of two that divides it
    tile = min(size, most)
    return (tile, min(size // tile, INNER)) if tile >= LEAST else (0, 0)


def summands_of(group: int, groups: int, units: int, are_words_of_outputs: bool) -> int:
    """How many programs share the inputs of the same outputs.

    Args:
        group: inputs that share a scale.
        groups: of them.
        units: outputs, or words with levels of several of them.
    """
    programs = -(-units // (WORDS if are_words_of_outputs else OUTPUTS))
    tile, inner = tiles_of(group, groups == 1, are_words_of_outputs)
    fewest = STEPS_OF_WORDS if are_words_of_outputs else STEPS
    most = min(group * groups // (tile * inner) // fewest, MOST_SUMMANDS)
    wanted = 1
    while 2 * wanted <= most and programs * wanted < PROGRAMS:
        wanted *= 2
    return wanted


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
    """`quantized_product` on a device."""
    rows, groups, units, inputs_per_word = input.shape
    runs, length = weight.shape[:2]
    shape = summands, rows, runs, length, outputs_per_word
    if not (input.numel() and weight.numel()):  # of a rank that has no piece
        return input.new_zeros(shape, dtype=torch.float32)
    words, scales = weight.flatten(2, 3).flatten(0, 1), scale.flatten(0, 1)
    zeros = scales if zero is None else zero.flatten(0, 1)
    is_packed = weight.dtype is torch.int32
    are_of_outputs = outputs_per_word > 1
    group = units * inputs_per_word
    tile, inner = tiles_of(group, groups == 1, are_of_outputs)
    inputs = groups * group
    several = triton.cdiv(inputs, tile * inner * summands)
    block = WORDS if are_of_outputs else OUTPUTS
    outputs = len(words) * outputs_per_word
    out = input.new_empty(shape, dtype=torch.float32)
    _multiply[(triton.cdiv(len(words), block), summands)](
        input.contiguous(), words, scales, zeros, out,
        rows, len(words), outputs, inputs,
        *words.stride(), *scales.stride(), *zeros.stride(),
        ROWS=1 if rows == 1 else MOST, BLOCK=block, TILE=tile, INNER=inner, GROUP=group,
        LEVELS=max(outputs_per_word, inputs_per_word) if is_packed else BYTES,
        IS_PACKED=is_packed, OF_OUTPUTS=are_of_outputs, INTERLEAVED=interleaved,
        PER_SCALE=outputs // len(scales), PER_ZERO=outputs // len(zeros),
        HAS_ZERO=zero is not None, OFFSET=offset, WRAPS=zero_wraps,
        SEVERAL=several, IS_RAGGED=several * summands * tile * inner != inputs, num_warps=WARPS,
    )  # fmt: skip
    return out


if triton is not None:

    @triton.jit
    def _level(words, INDEX: tl.constexpr, COUNT: tl.constexpr, INTERLEAVED: tl.constexpr):
        """One of the levels of each word."""
        bits: tl.constexpr = 32 // COUNT
        half: tl.constexpr = INDEX // 2 + INDEX % 2 * (COUNT // 2)
        place: tl.constexpr = half if INTERLEAVED else INDEX
        return (words >> place * bits) & ((1 << bits) - 1)

    # Levels of a word in dimensions of two, so that they stay in the registers of its thread.

    @triton.jit
    def _two(
        words, FIRST: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr,
        INTERLEAVED: tl.constexpr,
    ):  # fmt: skip
        return tl.join(
            _level(words, FIRST, COUNT, INTERLEAVED),
            _level(words, FIRST + STEP, COUNT, INTERLEAVED),
        )

    @triton.jit
    def _four(
        words, FIRST: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr,
        INTERLEAVED: tl.constexpr,
    ):  # fmt: skip
        return tl.join(
            _two(words, FIRST, 2 * STEP, COUNT, INTERLEAVED),
            _two(words, FIRST + STEP, 2 * STEP, COUNT, INTERLEAVED),
        )

    @triton.jit
    def _eight(
        words, FIRST: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr,
        INTERLEAVED: tl.constexpr,
    ):  # fmt: skip
        return tl.join(
            _four(words, FIRST, 2 * STEP, COUNT, INTERLEAVED),
            _four(words, FIRST + STEP, 2 * STEP, COUNT, INTERLEAVED),
        )

    @triton.jit
    def _unpacked(words, COUNT: tl.constexpr, INTERLEAVED: tl.constexpr):
        """The levels of words, int32 [..., 2, 2, ...], of which the last dimensions are COUNT."""
        if COUNT == 4:
            levels = _four(words, 0, 1, COUNT, INTERLEAVED)
        elif COUNT == 8:
            levels = _eight(words, 0, 1, COUNT, INTERLEAVED)
        else:
            levels = tl.join(
                _eight(words, 0, 2, COUNT, INTERLEAVED), _eight(words, 1, 2, COUNT, INTERLEAVED)
            )
        return levels

    @triton.jit
    def _behind_power(integers):
        """2**23 plus integers of fewer bits, as float32: their bits are those behind 2**23's."""
        return (integers | 0x4B000000).to(tl.float32, bitcast=True)

    @triton.jit
    def _zeros(
        zeros, unit, is_unit, group, zero_o, zero_g, BLOCK: tl.constexpr, COUNT: tl.constexpr,
        IS_PACKED: tl.constexpr, INTERLEAVED: tl.constexpr, PER_ZERO: tl.constexpr,
        HAS_ZERO: tl.constexpr, OFFSET: tl.constexpr, WRAPS: tl.constexpr,
    ):  # fmt: skip
        """The zero points of levels, float32 [BLOCK, COUNT]; plus 2**23 for packed ones."""
        if not HAS_ZERO:
            points = tl.full([BLOCK, COUNT], OFFSET, tl.int32)
        elif not IS_PACKED:
            place = zeros + unit // PER_ZERO * zero_o + group * zero_g
            points = tl.load(place, mask=is_unit, other=0).to(tl.int32)[:, None] + OFFSET
        else:
            bits: tl.constexpr = 32 // PER_ZERO
            if COUNT > 1:
                place = zeros + unit * zero_o + group * zero_g
                words = tl.load(place, mask=is_unit, other=0)
                points = tl.reshape(_unpacked(words, COUNT, INTERLEAVED), [BLOCK, COUNT])
            else:
                place = zeros + unit // PER_ZERO * zero_o + group * zero_g
                words = tl.load(place, mask=is_unit, other=0)
                points = ((words >> unit % PER_ZERO * bits) & ((1 << bits) - 1))[:, None]
            points += OFFSET
            if WRAPS:
                points = points & ((1 << bits) - 1)
        return _behind_power(points) if IS_PACKED else points.to(tl.float32)

    @triton.jit
    def _numbers(
        words, unit, is_unit, first, zero, word_o, word_i, last, BLOCK: tl.constexpr,
        WIDE: tl.constexpr, LEVELS: tl.constexpr, IS_PACKED: tl.constexpr,
        INTERLEAVED: tl.constexpr, HAS_ZERO: tl.constexpr, OFFSET: tl.constexpr,
        IS_RAGGED: tl.constexpr,
    ):  # fmt: skip
        """A tile of levels, less their zero points: float32 [BLOCK, WIDE, LEVELS]."""
        wide = first + tl.arange(0, WIDE)
        if IS_PACKED:
            place = words + unit[:, None] * word_o + wide[None, :] * word_i
            here = is_unit[:, None]
            if IS_RAGGED:
                here = here & (wide < last)[None, :]
            packed = tl.load(place, mask=here, other=0)
            levels = tl.reshape(_unpacked(packed, LEVELS, INTERLEAVED), [BLOCK, WIDE, LEVELS])
            return _behind_power(levels) - zero[:, None, :]
        at = wide[:, None] * LEVELS + tl.arange(0, LEVELS)[None, :]
        place = words + unit[:, None, None] * word_o + at[None, :, :] * word_i
        here = is_unit[:, None, None]
        if IS_RAGGED:
            here = here & (at < last)[None, :, :]
        numbers = tl.load(place, mask=here, other=0.0).to(tl.float32)
        if HAS_ZERO or OFFSET != 0:
            numbers = numbers - zero[:, None, :]
        return numbers

    @triton.jit
    def _inputs(input, at, inputs, IS_RAGGED: tl.constexpr):
        """Inputs of one row, float32."""
        if IS_RAGGED:
            return tl.load(input + at, mask=at < inputs, other=0.0).to(tl.float32)
        return tl.load(input + at).to(tl.float32)

    @triton.jit
    def _multiply(
        input, words, scales, zeros, out, rows, units, outputs, inputs,
        word_o, word_i, scale_o, scale_g, zero_o, zero_g,
        ROWS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, INNER: tl.constexpr,
        GROUP: tl.constexpr, LEVELS: tl.constexpr, IS_PACKED: tl.constexpr,
        OF_OUTPUTS: tl.constexpr, INTERLEAVED: tl.constexpr, PER_SCALE: tl.constexpr,
        PER_ZERO: tl.constexpr, HAS_ZERO: tl.constexpr, OFFSET: tl.constexpr,
        WRAPS: tl.constexpr, SEVERAL: tl.constexpr, IS_RAGGED: tl.constexpr,
    ):  # fmt: skip
        # A tile of levels is [BLOCK, WIDE, LEVELS]: units of outputs, of inputs, and their levels,
        # which are of COUNT outputs.
        WIDE: tl.constexpr = TILE if OF_OUTPUTS else TILE // LEVELS
        COUNT: tl.constexpr = LEVELS if OF_OUTPUTS else 1
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
        last = inputs // LEVELS if IS_PACKED and not OF_OUTPUTS else inputs
        for index in range(SEVERAL):
            step = tl.program_id(1) * SEVERAL + index
            group = step * (TILE * INNER) // GROUP
            if IS_RAGGED:  # there may be no such step, and its inputs are zeros
                group = tl.minimum(group, inputs // GROUP - 1)
            place = scales + output // PER_SCALE * scale_o + group * scale_g
            scale = tl.load(place, mask=is_unit[:, None], other=0.0).to(tl.float32)
            zero = _zeros(
                zeros, unit, is_unit, group, zero_o, zero_g, BLOCK, COUNT,
                IS_PACKED, INTERLEAVED, PER_ZERO, HAS_ZERO, OFFSET, WRAPS,
            )  # fmt: skip
            sums = tl.zeros_like(total)
            for inner in tl.static_range(INNER):
                tile = step * INNER + inner
                numbers = _numbers(
                    words, unit, is_unit, tile * WIDE, zero, word_o, word_i, last, BLOCK,
                    WIDE, LEVELS, IS_PACKED, INTERLEAVED, HAS_ZERO, OFFSET, IS_RAGGED,
                )  # fmt: skip
                if ROWS > 1:
                    at = tile * TILE + tl.arange(0, TILE)
                    here = (row < rows)[:, None]
                    if IS_RAGGED:
                        here = here & (at < inputs)[None, :]
                    x = tl.load(input + row[:, None] * inputs + at[None, :], mask=here, other=0.0)
                    if OF_OUTPUTS:
                        numbers = tl.permute(numbers, (1, 0, 2))
                        matrix = tl.reshape(numbers, [TILE, BLOCK * COUNT])
                    else:
                        matrix = tl.trans(tl.reshape(numbers, [BLOCK, TILE]))
                    sums = tl.dot(x, matrix.to(x.dtype), sums, input_precision="ieee")
                elif OF_OUTPUTS:
                    at = tile * TILE + tl.arange(0, TILE)
                    x = _inputs(input, at, inputs, IS_RAGGED)
                    sums += numbers * x[None, :, None]
                else:
                    at = (tile * WIDE + tl.arange(0, WIDE))[:, None] * LEVELS
                    x = _inputs(input, at + tl.arange(0, LEVELS)[None, :], inputs, IS_RAGGED)
                    sums += tl.sum(numbers * x[None, :, :], 2)
            if ROWS > 1:
                total += sums * tl.reshape(scale, [1, BLOCK * COUNT])
            elif OF_OUTPUTS:
                total += sums * scale[:, None, :]
            else:
                total += sums * scale
        part = out + tl.program_id(1) * rows * outputs
        if ROWS > 1:
            column = tl.program_id(0) * (BLOCK * COUNT) + tl.arange(0, BLOCK * COUNT)
            is_there = (row < rows)[:, None] & (column < outputs)[None, :]
            tl.store(part + row[:, None] * outputs + column[None, :], total, mask=is_there)
        elif OF_OUTPUTS:
            tl.store(part + output, tl.sum(total, 1), mask=is_unit[:, None])
        else:
            tl.store(part + unit, tl.sum(total, 1), mask=is_unit)
