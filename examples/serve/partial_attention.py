"""Attention to the keys that one rank has of sequences, as operators.

A partial result comes with its *statistics*, the logarithms of the sums of exponentials: by them
parts become the whole, as in ring attention (https://arxiv.org/abs/2310.01889). The operators have
a dimension of ranks in front, along which a mesh cuts pools. So a rank runs them for its own part,
and one process for all parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

import cg

from . import paged
from .float8_cache import dequantize
from .host_attention import alike

TILE = 1 << 25
"""The most products that are in memory at a time, where no kernel attends."""

_LIBRARY = torch.library.Library("cg_paged", "FRAGMENT")


def _name(is_float8: bool, has_mask: bool) -> str:
    return "attend_part" + "_float8" * is_float8 + "_masked" * has_mask


_KINDS = list(itertools.product((False, True), repeat=2))
"""Whether pools are in float8, and whether there is a mask."""
for _is_float8, _has_mask in _KINDS:
    _exponents, _mask = "Tensor exponents, " * _is_float8, "Tensor mask, " * _has_mask
    _LIBRARY.define(
        f"{_name(_is_float8, _has_mask)}(Tensor query, Tensor pool, {_exponents}Tensor tables, "
        f"Tensor last, {_mask}float scale, float cap) -> (Tensor, Tensor)"
    )
    # A rank has a part of each sequence, and with tensor parallelism some heads of it.
    _words = "rgsw", "cbegx", *("cbegk",) * _is_float8, "t", "cp", *("crhqn",) * _has_mask
    _operator = getattr(torch.ops.cg_paged, _name(_is_float8, _has_mask)).default
    cg.layout_rule(_operator, f"{','.join(_words)}->crgsv,crgs", cut="cg")


def attend_parts(
    query: Tensor,
    pool: Tensor,
    tables: Tensor,
    last: Tensor,
    scale: float,
    *,
    exponents: Tensor | None = None,
    mask: Tensor | None = None,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attend to the keys of each part, up to the last one that a token sees.

    Args:
        query: [rows, kv heads, heads that share one * tokens, width of a key]; tokens are next to
            one another.
        pool: [parts, blocks, size, kv heads, width of a key + width of a value].
        tables: int64 [rows * blocks of a row].
        last: int64 [parts, rows * tokens], which of a part's keys is the last that a token sees,
            counted in the row's blocks; -1: none.
        scale: of the products.
        exponents: of scales in float8, uint8 [parts, blocks, size, kv heads, 2]; None: the pool has
            plain numbers.
        mask: [parts, rows, 1, tokens, keys], which is added to products; None: a token sees all
            keys up to its last one.
        cap: of products, which are bent to be smaller, by a hyperbolic tangent; 0: none.

    Returns:
        Results [parts, rows, kv heads, heads * tokens, width of a value], and their statistics, in
        float32, without the last dimension. A token that sees nothing has zeros, and minus infinity
        or so low a number that its share in a sum is 0.
    """
    chosen: Callable[..., Any] = getattr(
        torch.ops.cg_paged, _name(exponents is not None, mask is not None)
    )
    optional = [[] if operand is None else [operand] for operand in (exponents, mask)]
    out, statistics = chosen(query, pool, *optional[0], tables, last, *optional[1], scale, cap)
    return out, statistics


# -- one part --------------------------------------------------------------------------------------

_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass(frozen=True)
class OnePart:
    """A part of the keys and values, and how they are attended to.

    Attributes:
        pool, exponents, scale, cap: as `attend_parts` takes them, without the dimension of parts.
    """

    pool: Tensor
    exponents: Tensor | None
    scale: float
    cap: float

    def attend(
        self, query: Tensor, tables: Tensor, last: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`attend_parts` of the part."""
        (rows, _, queries, width), size = query.shape, self.pool.shape[1]
        table, at = tables.view(rows, -1), last.reshape(rows, -1)
        if query.device.type != "cpu":
            has_kernel = not self.cap and self.pool.shape[-1] == 2 * width
            if has_kernel and paged.is_served(query.device, queries, mask):
                return paged.attend_with_statistics(
                    query, self.pool, tables, last, self.scale, self.exponents
                )
            return self._attend_to(table.shape[1] * size, query, table, at, mask)
        lengths = at.amax(1) + 1
        batches, length = alike(lengths.tolist(), size), int(lengths.max())
        if len(batches) == 1 and length:
            return self._attend_to(length, query, table, at, mask)
        out = query.new_zeros(*query.shape[:-1], self.pool.shape[-1] - width)
        statistics = query.new_full(query.shape[:-1], -torch.inf, dtype=torch.float32)
        for several in batches:
            of = torch.tensor(several)
            if length := int(lengths[of].max()):
                masks = None if mask is None else mask[of]
                results = self._attend_to(length, query[of], table[of], at[of], masks)
                out[of], statistics[of] = results
        return out, statistics

    def _attend_to(
        self, length: int, query: Tensor, table: Tensor, last: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The same, to the first `length` keys of each row."""
        keys, values = self._read(length, query, table)
        if mask is None:
            hides = torch.arange(length, device=query.device) > last[:, None, :, None]
            mask = torch.zeros(hides.shape, dtype=query.dtype, device=query.device)
            # No infinity, of which a row that sees nothing would make no number.
            mask = mask.masked_fill(hides, torch.finfo(query.dtype).min)
        mask = mask[..., :length]
        mask = mask.repeat(1, 1, query.shape[2] // mask.shape[2], 1)
        if self.cap or query.device.type != "cpu":
            return self._by_products(query, keys, values, mask)
        widest = max(keys.shape[-1], values.shape[-1])  # the kernel takes one width
        padded = (F.pad(t, (0, widest - t.shape[-1])) for t in (query, keys, values))
        out, statistics = _KERNEL(*padded, 0.0, False, attn_mask=mask, scale=self.scale)
        return out[..., : values.shape[-1]], statistics

    def _read(self, length: int, query: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of rows, [rows, kv heads, length, width]."""
        rows, size, width = len(query), self.pool.shape[1], query.shape[-1]
        read = table[:, : -(-length // size)].flatten()

        def shown(blocks: Tensor) -> Tensor:
            by_rows = blocks.index_select(0, read).view(rows, -1, *blocks.shape[2:])
            return by_rows[:, :length].transpose(1, 2)

        keys, values = shown(self.pool).split((width, self.pool.shape[-1] - width), -1)
        if self.exponents is None:
            return keys, values
        of_keys, of_values = shown(self.exponents).unbind(-1)
        return dequantize(keys, of_keys, query.dtype), dequantize(values, of_values, query.dtype)

    def _by_products(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention with as many products in memory at a time as `TILE` says."""
        rows, groups, queries, _ = query.shape
        step = max(1, TILE // (rows * groups * keys.shape[2]))
        results, statistics = [], []
        for first in range(0, queries, step):
            scores = (query[:, :, first : first + step] @ keys.mT).float() * self.scale
            if self.cap:
                scores = torch.tanh(scores / self.cap) * self.cap
            scores = scores + mask[:, :, first : first + step]
            statistics.append(scores.logsumexp(-1))
            shares = torch.exp(scores - statistics[-1][..., None])
            results.append(shares.to(values.dtype) @ values)
        return torch.cat(results, 2), torch.cat(statistics, 2)


def _each_part(is_float8: bool, has_mask: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """The operator of a kind: what `OnePart.attend` gives for each part."""

    def attend(query: Tensor, pool: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        *tensors, scale, cap = others
        exponents = tensors.pop(0) if is_float8 else [None] * len(pool)
        tables, last, *masks = tensors
        mask = masks[0] if has_mask else [None] * len(pool)
        results = [
            OnePart(own, powers, scale, cap).attend(query, tables, at, seen)
            for own, powers, at, seen in zip(pool, exponents, last, mask, strict=True)
        ]
        out, statistics = map(torch.stack, zip(*results, strict=True))
        return out, statistics

    return attend


def _shapes(query: Tensor, pool: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Empty results of the shapes and the types that `attend_parts` gives."""
    shape = len(pool), *query.shape[:-1]
    width = pool.shape[-1] - query.shape[-1]
    return query.new_empty(*shape, width), query.new_empty(shape, dtype=torch.float32)


for _kind in _KINDS:
    _LIBRARY.impl(_name(*_kind), _shapes, "Meta")
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name(*_kind), _each_part(*_kind), _key)
