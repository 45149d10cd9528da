"""Attention with dropout, tile by tile: some rows of the queries, and some keys.

Memory is bounded: scores and the mask of one tile are there at a time. Results of tiles are joined
by the largest scores and sums of exponentials (Milakov and Gimelshein,
https://arxiv.org/abs/1805.02867), and the backward computes scores and mask again, as
FlashAttention does (Dao et al., https://arxiv.org/abs/2205.14135).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ....ir.layout import Interval
from .random_masks import RandomMask

_ENTRIES = {"cpu": 1 << 18}
_ENTRIES_OF_DEVICES = 1 << 23
"""The scores of a tile: few in the caches of a host, many for a device, whose launches cost."""

_SHORTEST = 32
"""Rows and keys that a tile has at least."""


@dataclass(frozen=True)
class _Totals:
    """Gradients that tiles are added to; `bias` is None if nobody needs its."""

    key: Tensor
    value: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class TiledAttention:
    """Attention of queries, keys and values, some of whose shares are dropped.

    Attributes:
        query, key, value: `[B, H, S, E]`, `[B, G, T, E]` and `[B, G, T, F]`; `G` divides `H`.
        bias: bool, whether a score counts, or what is added to it; four dimensions, of which each
            is that of the scores `[B, H, S, T]`, or 1.
        kept: the mask.
        is_causal: whether a row sees the keys up to its own place alone.
        scale: the factor of products.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    kept: RandomMask
    is_causal: bool
    scale: float

    def forward(self) -> tuple[Tensor, Tensor]:
        """The result `[B, H, S, F]`, and for each row the logarithm of its sum of exponentials.

        The sum is of all scores. It is that of none, minus infinity, where a row sees no key: there
        the result is zeros.
        """
        outs, sums = [], []
        for rows in self._rows():
            out, logsumexp = self._forward_of(rows)
            outs.append(out.to(self.query.dtype))
            sums.append(logsumexp)
        return in_order_of(self.query, torch.cat(outs, 2)), torch.cat(sums, 2)

    def _forward_of(self, rows: Interval) -> tuple[Tensor, Tensor]:
        shape = (*self.query.shape[:2], rows[1] - rows[0])
        largest = self.query.new_full((*shape, 1), -math.inf, dtype=self._wide)
        total = torch.zeros_like(largest)
        out = self.query.new_zeros((*shape, self.value.shape[3]), dtype=self._wide)
        axes = self._axes(rows)
        for columns in self._columns(rows):
            scores = self._scores(rows, columns)
            previous, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
            base = _finite(largest)
            shares, shrinks = torch.exp(scores - base), torch.exp(previous - base)
            total = total * shrinks + shares.sum(-1, keepdim=True)
            shares = shares * self.kept.tile(axes, columns)
            value = self._part(self.value, columns)
            out = out * shrinks + self._by_head(self._by_group(shares) @ value)
        out = out * self.kept.factor / total.masked_fill(total == 0, 1.0)
        return out, (_finite(largest) + total.log()).squeeze(-1)

    def backward(
        self, gradient: Tensor, out: Tensor, logsumexp: Tensor, of_bias: bool
    ) -> list[Tensor]:
        """The gradients of queries, keys and values, and, if it is asked for, of `bias`.

        Args:
            gradient: of the result.
            out, logsumexp: the results; of keys that are a part of all, those of all.
            of_bias: whether that of `bias` is needed.
        """
        totals = self._zeros(of_bias)
        results = (gradient, out, logsumexp)
        query = torch.cat([self._backward_of(rows, results, totals) for rows in self._rows()], 2)
        pairs = ((query, self.query), (totals.key, self.key), (totals.value, self.value))
        gradients = [in_order_of(like, own.to(like.dtype)) for own, like in pairs]
        if self.bias is not None and totals.bias is not None:
            gradients.append(totals.bias.to(self.bias.dtype))
        return gradients

    def _zeros(self, of_bias: bool) -> _Totals:
        key, value = (t.new_zeros(t.shape, dtype=self._wide) for t in (self.key, self.value))
        if self.bias is None or not of_bias:
            return _Totals(key, value, None)
        return _Totals(key, value, self.bias.new_zeros(self.bias.shape, dtype=self._wide))

    def _backward_of(
        self, rows: Interval, results: tuple[Tensor, Tensor, Tensor], totals: _Totals
    ) -> Tensor:
        """The gradient of some queries; those of keys, values and `bias` are added to `totals`.

        Args:
            rows: the queries.
            results: the gradient of the result, the result, and the logarithms of sums.
            totals: what is added to.
        """
        gradient, out = (self._part(tensor, rows) for tensor in results[:2])
        expected = (gradient * out).sum(-1, keepdim=True)
        base = _finite(results[2][:, :, slice(*rows), None])
        axes, gradient = self._axes(rows), self._by_group(gradient)
        query = self._by_group(self._part(self.query, rows))
        of_query = torch.zeros_like(query)
        for columns in self._columns(rows):
            at = slice(*columns)
            shares = torch.exp(self._scores(rows, columns) - base)
            factors = self.kept.tile(axes, columns).to(self._wide) * self.kept.factor
            totals.value[:, :, at] += self._by_group(shares * factors).mT @ gradient
            of_shares = self._by_head(gradient @ self._part(self.value, columns).mT)
            of_scores = shares * (of_shares * factors - expected)
            if totals.bias is not None:
                tile = self._tile_of_bias(totals.bias, rows, columns)
                tile += of_scores.sum_to_size(tile.shape)
            grouped = self._by_group(of_scores * self.scale)
            of_query += grouped @ self._part(self.key, columns)
            totals.key[:, :, at] += grouped.mT @ query
        return self._by_head(of_query)

    @property
    def _wide(self) -> torch.dtype:
        """The type of scores, and of sums."""
        return torch.promote_types(self.query.dtype, torch.float32)

    def _rows(self) -> Iterator[Interval]:
        return _tiles(self.query.shape[2], _side(self.query))

    def _columns(self, rows: Interval) -> Iterator[Interval]:
        """The keys of each tile that these rows may see."""
        for columns in _tiles(self.key.shape[2], _side(self.query)):
            if not self.is_causal or columns[0] < rows[1]:
                yield columns

    def _axes(self, rows: Interval) -> tuple[Tensor, Tensor, Tensor]:
        batch, heads, of_rows = self.kept.axes()
        return batch, heads, of_rows[slice(*rows)]

    def _scores(self, rows: Interval, columns: Interval) -> Tensor:
        """The scores of a tile; those that do not count are minus infinity."""
        query, key = self._part(self.query, rows), self._part(self.key, columns)
        scores = self._by_head(self._by_group(query) @ key.mT) * self.scale
        if self.is_causal and columns[1] > rows[0] + 1:
            row, column = (torch.arange(*places, device=query.device) for places in (rows, columns))
            scores = scores.masked_fill(column > row[:, None], -math.inf)
        if self.bias is None:
            return scores
        bias = self._tile_of_bias(self.bias, rows, columns)
        if bias.dtype is torch.bool:
            return scores.masked_fill(~bias, -math.inf)
        return scores + bias.to(self._wide)

    def _part(self, tensor: Tensor, places: Interval) -> Tensor:
        """Some rows, or keys, in the type of scores."""
        return tensor[:, :, slice(*places)].to(self._wide)

    @staticmethod
    def _tile_of_bias(bias: Tensor, rows: Interval, columns: Interval) -> Tensor:
        bias = bias[:, :, slice(*rows)] if bias.shape[2] > 1 else bias
        return bias[..., slice(*columns)] if bias.shape[3] > 1 else bias

    def _by_group(self, tensor: Tensor) -> Tensor:
        """Rows of all heads that share keys, one head after the other."""
        return tensor.reshape(tensor.shape[0], self.key.shape[1], -1, tensor.shape[3])

    def _by_head(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(tensor.shape[0], self.query.shape[1], -1, tensor.shape[3])


def in_order_of(like: Tensor, tensor: Tensor) -> Tensor:
    """A tensor with its dimensions in the order that those of another one have in memory."""
    strides = like.stride()
    order = sorted(range(like.dim()), key=lambda dim: -strides[dim])
    inverse = [order.index(dim) for dim in range(like.dim())]
    return tensor.permute(order).contiguous().permute(inverse)


def is_one_tile(query: Tensor, key: Tensor) -> bool:
    """True if all scores of queries and keys are in one tile."""
    return max(query.shape[2], key.shape[2]) <= _side(query)


def _side(query: Tensor) -> int:
    """The rows and the keys of a tile."""
    entries = _ENTRIES.get(query.device.type, _ENTRIES_OF_DEVICES)
    side = math.isqrt(entries // (query.shape[0] * query.shape[1]))
    return max(side // _SHORTEST, 1) * _SHORTEST


def _tiles(length: int, side: int) -> Iterator[Interval]:
    for start in range(0, length, side):
        yield start, min(start + side, length)


def _finite(tensor: Tensor) -> Tensor:
    """Zero for minus infinity, so that differences to it are numbers."""
    return tensor.masked_fill(tensor == -math.inf, 0.0)
