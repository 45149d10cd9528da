"""The product of few rows with a quantized weight on a device, by kernels of Triton.

Each program takes some outputs and a part of the inputs. It reads tiles of levels, and multiplies
sums over inputs of one scale by the scale. Programs that have parts of the inputs of the same
outputs give summands of the result. Whoever takes it adds them up, so sums do not depend on which
program is first. One row is multiplied in registers (`row_kernel.py`), several on tensor cores
(`rows_kernel.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import row_kernel, rows_kernel
from .row_kernel import BYTES, POWER, REGISTERS
from .rows_kernel import ROWS, Halves, has_assembly

try:
    import triton
except ImportError:  # torch for CPUs comes without it
    triton = None

MOST = ROWS
"""The most rows."""
LEAST = 16
"""The fewest inputs of a tile, for a product of tensor cores."""
FLOAT8 = (8, 9)
"""The compute capability from which on devices compute with float8_e4m3fn."""
TYPES = (torch.float16, torch.bfloat16)
"""Of inputs."""


@dataclass(frozen=True)
class Tiles:
    """How programs share a product; sizes are powers of two.

    Attributes:
        units: outputs of a program, or words with levels of several outputs.
        inputs: of a tile.
        inner: tiles of a step, whose sums are multiplied by a scale together.
        warps: of a program.
        unrolled: steps whose reads are under way together.
        steps: the fewest of a program.
        programs: as many as keep the memory of a device busy.
        least: the fewest units, where there are at most half as many programs otherwise.
    """

    units: int
    inputs: int
    inner: int
    warps: int
    unrolled: int
    steps: int
    programs: int
    least: int


ROW, ROW_OF_WORDS = Tiles(64, 128, 1, 2, 1, 2, 1024, 32), Tiles(8, 16, 8, 4, 1, 2, 1024, 8)
"""For one row and words; the second where a word has levels of several outputs."""
ROW_OF_BYTES = Tiles(16, 128, 1, 2, 2, 2, 1056, 16)
TILES, TILES_OF_WORDS = Tiles(64, 128, 1, 4, 1, 2, 384, 64), Tiles(8, 128, 1, 4, 1, 2, 384, 8)
"""For several rows."""
MOST_SUMMANDS = 8
"""Whoever takes a product reads them all."""


def has_kernel(device: torch.device, levels: torch.dtype, inputs: torch.dtype) -> bool:
    """True if the kernel runs on a device, with levels and inputs of a type."""
    if triton is None or device.type != "cuda" or inputs not in TYPES:
        return False
    return levels is not torch.float8_e4m3fn or has_float8(device)


def has_float8(device: torch.device) -> bool:
    """True if a device of CUDA computes with float8_e4m3fn.

    AMD's have compute capabilities, too, which are other numbers. Many of them have e4m3fnuz, whose
    bits stand for other numbers, so ROCm is left out.
    """
    return not torch.version.hip and torch.cuda.get_device_capability(device) >= FLOAT8


def tiles_of(
    rows: int, levels: torch.dtype, words_of_outputs: bool, group: int, inputs: int, units: int
) -> Tiles | None:
    """The tiles of a product; None if none divide the inputs of a scale.

    Args:
        rows: of the input.
        levels: the type of levels, or of the words that they are in.
        words_of_outputs: whether a word has levels of several outputs.
        group: inputs that share a scale. If these are all, the last tile may be ragged.
        inputs: of the weight.
        units: outputs, or words with levels of several of them.
    """
    if rows == 1 and levels is not torch.int32:
        tiles = ROW_OF_BYTES
    elif rows == 1:
        tiles = ROW_OF_WORDS if words_of_outputs else ROW
    else:
        tiles = TILES_OF_WORDS if words_of_outputs else TILES
    if group < inputs:
        size = group & -group  # the largest power of two that divides it
        tile = min(size, tiles.inputs)
        tiles = replace(tiles, inputs=tile, inner=min(size // tile, tiles.inner))
    steps = _summands(tiles, inputs)[-1]
    while 2 * units * steps <= tiles.units * tiles.programs and tiles.units > tiles.least:
        tiles = replace(tiles, units=tiles.units // 2)
    return tiles if tiles.inputs >= LEAST else None


def summands_of(tiles: Tiles, inputs: int, units: int) -> int:
    """How many programs share the inputs of the same outputs."""
    programs = -(-units // tiles.units)
    counts = _summands(tiles, inputs)
    return next((count for count in counts if programs * count >= tiles.programs), counts[-1])


def _summands(tiles: Tiles, inputs: int) -> list[int]:
    """Numbers of programs that can share inputs."""
    steps = max(inputs // (tiles.inputs * tiles.inner), 1)
    most = min(steps // tiles.steps, MOST_SUMMANDS)
    return [count for count in range(1, most + 1) if steps % count == 0] or [1]


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
    """`quantized_product` on a device; several rows are float16 or bfloat16.

    Raises:
        ValueError: no tile divides the inputs of a scale.
    """
    rows, groups, units, inputs_per_word = input.shape
    runs, length = weight.shape[:2]
    shape = summands, rows, runs, length, outputs_per_word
    if not (input.numel() and weight.numel()):  # of a rank that has no piece
        return input.new_zeros(shape, dtype=torch.float32)
    group = units * inputs_per_word
    inputs = groups * group
    levels = weight.flatten(2, 3).flatten(0, 1)
    tiles = tiles_of(rows, weight.dtype, outputs_per_word > 1, group, inputs, len(levels))
    if tiles is None:
        raise ValueError(f"a kernel takes no weight of shape {[*levels.shape]}, {group} a scale")
    scales = scale.flatten(0, 1)
    zeros = scales if zero is None else zero.flatten(0, 1)
    step = tiles.inputs * tiles.inner
    several = triton.cdiv(inputs, step * summands)
    outputs = len(levels) * outputs_per_word
    is_packed, count = weight.dtype is torch.int32, max(outputs_per_word, inputs_per_word)
    out = input.new_empty(shape, dtype=torch.float32)
    grid = triton.cdiv(len(levels), tiles.units), summands
    tensors = input.contiguous(), levels, scales, zeros, out
    sizes = len(levels), outputs, inputs, *levels.stride(), *scales.stride(), *zeros.stride()
    constants = {
        "BLOCK": tiles.units, "TILE": tiles.inputs, "GROUP": group, "COUNT": count,
        "PER_WORD": outputs_per_word, "INTERLEAVED": interleaved, "SEVERAL": several,
        "PER_SCALE": outputs // len(scales), "PER_ZERO": outputs // len(zeros),
        "HAS_ZERO": zero is not None, "IS_ZERO_PACKED": zeros.dtype is torch.int32,
        "OFFSET": offset, "WRAPS": zero_wraps, "IS_RAGGED": several * summands * step != inputs,
        "IS_PACKED": is_packed, "IS_FLOAT": weight.dtype is torch.float8_e4m3fn,
        "num_warps": tiles.warps,
    }  # fmt: skip
    if rows == 1:
        constants["COUNT"] = count if is_packed else min(BYTES, tiles.inputs)
        if not torch.version.hip:  # only NVIDIA's compiler has the option
            constants["maxnreg"] = REGISTERS
        row_kernel.multiply_row[grid](
            *tensors, *sizes, POWER, INNER=tiles.inner, UNROLLED=tiles.unrolled, **constants
        )
        return out
    halves = Halves.of(input.dtype, 32 // count)
    rows_kernel.multiply_rows[grid](
        *tensors, rows, *sizes, halves.mask, halves.power, halves.one,
        POINT=halves.point, ROWS=ROWS, IS_WIDE=halves.dtype is torch.float16,
        HAS_ASSEMBLY=has_assembly(), **constants,
    )  # fmt: skip
    return out
