"""Attention of a few tokens a row to a paged cache, as operators that read as far as rows are long.

On hosts they are torch's own operators (`host_attention`), on CUDA devices kernels of Triton. Each
program of these reads one part of a row's blocks for all heads that share keys: Flash-Decoding (Tri
Dao, Daniel Haziza, Francisco Massa, Grigory Sizov, 2023) over a block table (Kwon et al.,
"Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023). A second
kernel combines the parts of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import cg

from . import host_attention

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None

PART = 256
"""The most entries that one program reads."""
STEP = 64
"""Entries that it reads at once, and the fewest."""
PROGRAMS = 256
"""As many as keep a device busy."""
LEAST = 16
"""Rows and columns of Triton's smallest product."""
MOST = 64
"""The most queries of a row that share keys: heads of all its tokens."""

_LIBRARY = torch.library.Library("cg_paged", "DEF")
_NAMES = {(False, False): "attend", (False, True): "attend_masked"}
_NAMES |= {(True, False): "attend_float8", (True, True): "attend_float8_masked"}
"""The operators, by whether pools are in float8, and whether there is a mask."""

for (_is_float8, _has_mask), _name in _NAMES.items():
    _exponents, _mask = "Tensor exponents, " * _is_float8, "Tensor mask, " * _has_mask
    _LIBRARY.define(
        f"{_name}(Tensor query, Tensor pool, {_exponents}Tensor tables, Tensor positions, "
        f"{_mask}float scale) -> Tensor"
    )
    # On a mesh, ranks have the keys and values of some heads, and the queries that share them.
    _words = "rgsw", "begkw", *("begk",) * _is_float8, "t", "p", *("rhqn",) * _has_mask
    cg.layout_rule(getattr(torch.ops.cg_paged, _name).default, f"{','.join(_words)}->rgsw", cut="g")


def operator(is_float8: bool, has_mask: bool) -> Callable[..., Tensor]:
    """The operator for a batch: of pools in float8, or of plain ones; with a mask, or without."""
    chosen: Callable[..., Tensor] = getattr(torch.ops.cg_paged, _NAMES[is_float8, has_mask])
    return chosen


def is_served(device: torch.device, queries: int, mask: Tensor | None) -> bool:
    """True if the operators run on a device.

    Args:
        queries: of a row that share keys.
        mask: [rows, heads, tokens, keys], if a token does not see just those before it.
    """
    if device.type == "cpu":
        return mask is None or mask.shape[1] == 1
    return triton is not None and device.type == "cuda" and queries <= MOST and mask is None


def attend(
    query: Tensor,
    pool: Tensor,
    tables: Tensor,
    positions: Tensor,
    scale: float,
    exponents: Tensor | None = None,
) -> Tensor:
    """Attend to the tokens in the rows' blocks, up to the position of each query.

    Args:
        query: [rows, kv heads, heads that share one * tokens, width]; tokens are next to one
            another.
        pool: [blocks, block_size, kv heads, 2, width], contiguous: keys and values.
        tables: int64 [rows * blocks of a row].
        positions: int64 [rows * tokens], of the tokens that attend; their own keys are in the pool.
            It and the tables may be columns of a larger tensor.
        scale: of the products.
        exponents: as `host_attention.attend` takes them.

    Returns:
        A tensor of the shape and dtype of `query`.
    """
    out, _ = attend_with_statistics(query, pool, tables, positions, scale, exponents)
    return out


def attend_with_statistics(
    query: Tensor,
    pool: Tensor,
    tables: Tensor,
    positions: Tensor,
    scale: float,
    exponents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend`, and the logarithms of the sums of exponentials, float32 without the last dimension.

    A position of -1 sees nothing: its result is zeros, and its logarithm minus infinity.
    """
    query, tables, positions = query.contiguous(), tables.contiguous(), positions.contiguous()
    rows, groups, shared, width = query.shape
    blocks, tokens = tables.numel() // rows, positions.numel() // rows
    size = pool.shape[1]
    part = _part(rows * groups, blocks * size)
    parts = triton.cdiv(blocks * size, part)
    heads = max(LEAST, triton.next_power_of_2(shared))
    lanes = max(LEAST, triton.next_power_of_2(width))
    state = query.new_empty((rows, groups, parts, heads, 2), dtype=torch.float32)
    mixed = query.new_empty((rows, groups, parts, heads, width), dtype=torch.float32)
    _attend_to_part[(rows * groups, parts)](
        query, pool, pool if exponents is None else exponents, tables, positions, state, mixed,
        scale, blocks, parts,
        GROUPS=groups, SHARED=shared, TOKENS=tokens, HEADS=heads, LANES=lanes, WIDTH=width,
        SIZE=size, PART=part, STEP=STEP, IS_FLOAT8=exponents is not None,
    )  # fmt: skip
    out = torch.empty_like(query)
    statistics = query.new_empty(query.shape[:-1], dtype=torch.float32)
    _combine[(rows * groups,)](
        state, mixed, out, statistics, positions,
        GROUPS=groups, SHARED=shared, TOKENS=tokens, HEADS=heads, LANES=lanes, WIDTH=width,
        PART=part, PARTS=parts,
    )  # fmt: skip
    return out, statistics


def _part(programs: int, entries: int) -> int:
    """Entries that one program reads: fewer of short rows, if few programs share a device.

    Args:
        programs: rows, times the heads that have keys of their own: each part has as many.
        entries: of a row, at most.
    """
    part = STEP
    while part < PART and programs * triton.cdiv(entries, part) > PROGRAMS:
        part *= 2
    return part


def _attend_float8(
    query: Tensor, pool: Tensor, exponents: Tensor, tables: Tensor, positions: Tensor, scale: float
) -> Tensor:
    return attend(query, pool, tables, positions, scale, exponents)


if triton is not None:
    _LIBRARY.impl("attend", attend, "CUDA")
    _LIBRARY.impl("attend_float8", _attend_float8, "CUDA")

    @triton.jit
    def _float8(levels):
        """Numbers of bytes of float8_e4m3fn, as float32.

        A float16 with the same bits behind its sign is 2**8 times as small, also below the least
        normal number. So it takes no GPU that has float8.
        """
        bits = levels.to(tl.int16)
        halves = ((bits & 128) << 8) | ((bits & 127) << 7)
        numbers = halves.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((bits & 127) == 127, float("nan"), numbers)

    @triton.jit
    def _power(exponents):
        """Powers of two of bytes of exponents, as float32."""
        return (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)

    @triton.jit
    def _attend_to_part(
        query, pool, exponents, tables, positions, state, mixed, scale, blocks, parts,
        GROUPS: tl.constexpr, SHARED: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
        LANES: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr,
        STEP: tl.constexpr, IS_FLOAT8: tl.constexpr,
    ):  # fmt: skip
        at, part = tl.program_id(0), tl.program_id(1)
        row, group = at // GROUPS, at % GROUPS
        head, lane = tl.arange(0, HEADS), tl.arange(0, LANES)
        last = tl.load(positions + row * TOKENS + head % TOKENS)
        length = tl.max(last, 0) + 1
        first = part * PART
        if first >= length:
            return
        is_head, is_lane = head < SHARED, lane < WIDTH
        q = tl.load(
            query + (at * SHARED + head[:, None]) * WIDTH + lane[None, :],
            mask=is_head[:, None] & is_lane[None, :],
            other=0.0,
        )
        most = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        sums = tl.zeros([HEADS, LANES], tl.float32)
        for begin in range(0, PART, STEP):
            entry = first + begin + tl.arange(0, STEP)
            seen = entry < length
            block = tl.load(tables + row * blocks + entry // SIZE, mask=seen, other=0)
            place = (block * SIZE + entry % SIZE) * GROUPS + group
            here = pool + place[:, None] * (2 * WIDTH) + lane[None, :]
            is_there = seen[:, None] & is_lane[None, :]
            key = tl.load(here, mask=is_there, other=0)
            value = tl.load(here + WIDTH, mask=is_there, other=0)
            if IS_FLOAT8:  # in any type of a product they are exact
                key, value = _float8(key).to(q.dtype), _float8(value).to(q.dtype)
            scores = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
            if IS_FLOAT8:
                power = _power(tl.load(exponents + place * 2, mask=seen, other=0))
                scores = scores * power[None, :]
            scores = tl.where(entry[None, :] <= last[:, None], scores, float("-inf"))
            new = tl.maximum(most, tl.max(scores, 1))
            # Those of a token that sees nothing of this part are no numbers, and never read.
            shares = tl.exp(scores - new[:, None])
            shrink = tl.exp(most - new)
            total = total * shrink + tl.sum(shares, 1)
            sums = sums * shrink[:, None]
            if IS_FLOAT8:
                power = _power(tl.load(exponents + place * 2 + 1, mask=seen, other=0))
                shares = shares * power[None, :]
            sums += tl.dot(shares.to(value.dtype), value, input_precision="ieee")
            most = new
        place = (at * parts + part) * HEADS + head
        tl.store(state + place * 2, most)
        tl.store(state + place * 2 + 1, total)
        tl.store(mixed + place[:, None] * WIDTH + lane[None, :], sums, mask=is_lane[None, :])

    @triton.jit
    def _combine(
        state, mixed, out, statistics, positions,
        GROUPS: tl.constexpr, SHARED: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
        LANES: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    ):  # fmt: skip
        at = tl.program_id(0)
        head, lane = tl.arange(0, HEADS), tl.arange(0, LANES)
        last = tl.load(positions + at // GROUPS * TOKENS + head % TOKENS)
        is_lane = lane < WIDTH
        most = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        sums = tl.zeros([HEADS, LANES], tl.float32)
        for part in range(PARTS):
            is_there = part * PART <= last
            place = (at * PARTS + part) * HEADS + head
            its_most = tl.load(state + place * 2, mask=is_there, other=float("-inf"))
            new = tl.maximum(most, its_most)
            shrink, its_shrink = tl.exp(most - new), tl.exp(its_most - new)
            its_total = tl.load(state + place * 2 + 1, mask=is_there, other=0.0)
            total = total * shrink + its_total * its_shrink
            there = mixed + place[:, None] * WIDTH + lane[None, :]
            its_sums = tl.load(there, mask=is_there[:, None] & is_lane[None, :], other=0.0)
            sums = sums * shrink[:, None] + its_sums * its_shrink[:, None]
            most = new
        sees, is_head = last >= 0, head < SHARED
        here = out + (at * SHARED + head[:, None]) * WIDTH + lane[None, :]
        result = tl.where(sees[:, None], sums / total[:, None], 0.0)
        tl.store(here, result, mask=is_head[:, None] & is_lane[None, :])
        own = tl.where(sees, most + tl.log(total), float("-inf"))
        tl.store(statistics + at * SHARED + head, own, mask=is_head)


def _shape_of(query: Tensor, *_: Tensor | float) -> Tensor:
    return query.new_empty(query.shape)


def _attend_on_host(
    query: Tensor, pool: Tensor, tables: Tensor, positions: Tensor, scale: float
) -> Tensor:
    return host_attention.attend(query, pool, tables, positions, None, scale)


def _attend_float8_on_host(
    query: Tensor,
    pool: Tensor,
    exponents: Tensor,
    tables: Tensor,
    positions: Tensor,
    *options: Any,
) -> Tensor:
    *masks, scale = options
    mask = masks[0] if masks else None
    return host_attention.attend(query, pool, tables, positions, mask, scale, exponents)


for _name, _on_host in (
    ("attend", _attend_on_host),
    ("attend_masked", host_attention.attend),
    ("attend_float8", _attend_float8_on_host),
    ("attend_float8_masked", _attend_float8_on_host),
):
    _LIBRARY.impl(_name, _shape_of, "Meta")
    _LIBRARY.impl(_name, _on_host, "CPU")
