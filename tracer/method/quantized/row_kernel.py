"""The product of one row with a quantized weight, as a kernel of Triton.

Each program takes some outputs and a part of the inputs, as in `quantized_kernel.py`. Tensor cores
would multiply fifteen rows of nothing, too, and take numbers by way of shared memory. So levels
become float32 in the registers that they are read to, and are multiplied there.

A GPU reads 4 bits of a weight in less time than it takes for five instructions on each level, so
they are few. An integer behind the mantissa of a power of two is a float32 of two bit operations
in one instruction: its own bits, where they are, and those of the power whose last bit has that
place. The power is taken away with the zero point. Bytes are converted by the device, which knows
the NaN of float8.
"""

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None

POWER = 0x4B000000
"""2**23 as float32. The kernel has it as an argument: of two constants in one operation, a compiler
makes two instructions."""
REGISTERS = 128
"""Of a thread, at most, so that as many programs read at one time."""
BYTES = 16
"""Levels of a byte each that a thread reads by one instruction."""

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
    def _stored_points(
        zeros, unit, is_unit, group, zero_o, zero_g, IS_ZERO_PACKED: tl.constexpr,
        PER_ZERO: tl.constexpr, OFFSET: tl.constexpr, WRAPS: tl.constexpr,
    ):  # fmt: skip
        """The zero points of levels of one output each, float32 [BLOCK]."""
        stored = tl.load(zeros + unit // PER_ZERO * zero_o + group * zero_g, mask=is_unit, other=0)
        if IS_ZERO_PACKED:
            bits: tl.constexpr = 32 // PER_ZERO
            points = (stored >> unit % PER_ZERO * bits & ((1 << bits) - 1)) + OFFSET
            if WRAPS:
                points = points & ((1 << bits) - 1)
            # A conversion to float32 would take longer.
            numbers = (points | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
        else:
            numbers = stored.to(tl.float32) + OFFSET
        return numbers

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
        if OF_OUTPUTS:
            stored = tl.load(zeros + unit * zero_o + group * zero_g, mask=is_unit, other=0)
            points = tl.reshape(_unpacked(stored, power, LEVELS, INTERLEAVED), [BLOCK, LEVELS])
            if OFFSET != 0:
                points += OFFSET
                if WRAPS:
                    size: tl.constexpr = 1 << 32 // LEVELS
                    points = tl.where(points < powers + size, points, points - size)
            return points
        numbers = _stored_points(
            zeros, unit, is_unit, group, zero_o, zero_g, IS_ZERO_PACKED, PER_ZERO, OFFSET, WRAPS
        )
        return powers + numbers[:, None]

    @triton.jit
    def _inputs(input, at, inputs, IS_RAGGED: tl.constexpr):
        """Inputs of one row, float32."""
        if IS_RAGGED:
            return tl.load(input + at, mask=at < inputs, other=0.0).to(tl.float32)
        return tl.load(input + at).to(tl.float32)

    @triton.jit
    def multiply_row(
        input, levels, scales, zeros, out, units, outputs, inputs,
        level_o, level_i, scale_o, scale_g, zero_o, zero_g, power,
        BLOCK: tl.constexpr, TILE: tl.constexpr, INNER: tl.constexpr, UNROLLED: tl.constexpr,
        GROUP: tl.constexpr, COUNT: tl.constexpr, PER_WORD: tl.constexpr, IS_PACKED: tl.constexpr,
        IS_FLOAT: tl.constexpr, INTERLEAVED: tl.constexpr, PER_SCALE: tl.constexpr,
        PER_ZERO: tl.constexpr, HAS_ZERO: tl.constexpr, IS_ZERO_PACKED: tl.constexpr,
        OFFSET: tl.constexpr, WRAPS: tl.constexpr, SEVERAL: tl.constexpr, IS_RAGGED: tl.constexpr,
    ):  # fmt: skip
        # A tile is [BLOCK, WIDE, COUNT]: units of outputs, runs of inputs, and their levels. Those
        # of a word are of several outputs or of several inputs; bytes are a run of inputs.
        OF_OUTPUTS: tl.constexpr = PER_WORD > 1
        WIDE: tl.constexpr = TILE if OF_OUTPUTS else TILE // COUNT
        PER_UNIT: tl.constexpr = COUNT if IS_PACKED and not OF_OUTPUTS else 1
        unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        is_unit = unit < units
        output = unit[:, None] * PER_WORD + tl.arange(0, PER_WORD)[None, :]
        if OF_OUTPUTS:
            total = tl.zeros([BLOCK, WIDE, COUNT], tl.float32)
        else:
            total = tl.zeros([BLOCK, WIDE], tl.float32)
        for index in tl.range(SEVERAL, loop_unroll_factor=UNROLLED):
            step = tl.program_id(1) * SEVERAL + index
            group = step * (TILE * INNER) // GROUP
            if IS_RAGGED:  # there may be no such step, and its inputs are zeros
                group = tl.minimum(group, inputs // GROUP - 1)
            place = scales + output // PER_SCALE * scale_o + group * scale_g
            scale = tl.load(place, mask=is_unit[:, None], other=0.0).to(tl.float32)
            if IS_PACKED:
                points = _points(
                    zeros, unit, is_unit, group, zero_o, zero_g, power, BLOCK, COUNT, OF_OUTPUTS,
                    IS_ZERO_PACKED, INTERLEAVED, PER_ZERO, HAS_ZERO, OFFSET, WRAPS,
                )  # fmt: skip
            elif HAS_ZERO:
                points = _stored_points(
                    zeros, unit, is_unit, group, zero_o, zero_g, IS_ZERO_PACKED, PER_ZERO, OFFSET,
                    WRAPS,
                )[:, None]  # fmt: skip
            sums = tl.zeros_like(total)
            for inner in tl.static_range(INNER):
                first = (step * INNER + inner) * TILE
                at = first // PER_UNIT + tl.arange(0, TILE // PER_UNIT)
                here = is_unit[:, None]
                if IS_RAGGED:
                    here = here & (at < inputs // PER_UNIT)[None, :]
                place = levels + unit[:, None] * level_o + at[None, :] * level_i
                stored = tl.load(place, mask=here, other=0.0 if IS_FLOAT else 0)
                if IS_PACKED:
                    numbers = _unpacked(stored, power, COUNT, INTERLEAVED)
                else:
                    numbers = stored.to(tl.float32)
                numbers = tl.reshape(numbers, [BLOCK, WIDE, COUNT])
                if IS_PACKED or HAS_ZERO:
                    numbers -= points[:, None, :]
                elif OFFSET != 0:
                    numbers -= OFFSET
                if OF_OUTPUTS:
                    x = _inputs(input, at, inputs, IS_RAGGED)
                    sums += numbers * x[None, :, None]
                else:
                    run = first + tl.arange(0, WIDE)[:, None] * COUNT
                    x = _inputs(input, run + tl.arange(0, COUNT)[None, :], inputs, IS_RAGGED)
                    sums += tl.sum(numbers * x[None, :, :], 2)
            if OF_OUTPUTS:
                total += sums * scale[:, None, :]
            else:
                total += sums * scale
        part = out + tl.program_id(1) * outputs
        if OF_OUTPUTS:
            tl.store(part + output, tl.sum(total, 1), mask=is_unit[:, None])
        else:
            tl.store(part + unit, tl.sum(total, 1), mask=is_unit)
