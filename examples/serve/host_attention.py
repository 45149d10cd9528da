"""Attention of a few tokens a row to a paged cache on hosts, at the cost of the rows' own lengths.

Rows whose lengths are alike attend together, to the blocks that the longest of them has. So tables
may be as wide as the model's context: what is behind a row's last token is not read.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from .float8_cache import dequantize


def attend(
    query: Tensor,
    pool: Tensor,
    tables: Tensor,
    positions: Tensor,
    mask: Tensor | None,
    scale: float,
    exponents: Tensor | None = None,
) -> Tensor:
    """Attend to the tokens in the rows' blocks, up to the position of each query.

    Args:
        query: [rows, kv heads, heads that share one * tokens, width]; tokens are next to one
            another.
        pool: [blocks, block_size, kv heads, 2, width]: keys and values.
        tables: int64 [rows * blocks of a row].
        positions: int64 [rows * tokens], of the tokens that attend; their own keys are in the pool.
        mask: [rows, 1, tokens, blocks of a row * block_size], which is added to products; None: a
            token sees all those before it.
        scale: of the products.
        exponents: of the scales of keys and values in float8, uint8 [blocks, block_size, kv heads,
            2]; then the pool is uint8. None: the pool has the dtype of `query`.

    Returns:
        A tensor of the shape and dtype of `query`.
    """
    rows, size = len(query), pool.shape[1]
    table, at = tables.view(rows, -1), positions.reshape(rows, -1)
    lengths = at.amax(1) + 1
    batches = alike(lengths.tolist(), size)
    if len(batches) == 1:
        return _attend(query, pool, table, at, mask, int(lengths.max()), scale, exponents)
    out = torch.empty_like(query)
    for several in batches:
        of = torch.tensor(several)
        masks = None if mask is None else mask[of]
        length = int(lengths[of].max())
        out[of] = _attend(query[of], pool, table[of], at[of], masks, length, scale, exponents)
    return out


def alike(lengths: list[int], size: int) -> list[list[int]]:
    """Rows, such that the blocks of those together differ by less than a factor of two."""
    together: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        together.setdefault((-(-length // size)).bit_length(), []).append(row)
    return list(together.values())


def _attend(
    query: Tensor,
    pool: Tensor,
    table: Tensor,
    positions: Tensor,
    mask: Tensor | None,
    length: int,
    scale: float,
    exponents: Tensor | None,
) -> Tensor:
    """`attend`, to the first `length` tokens of each row."""
    rows, groups, queries, width = query.shape
    size = pool.shape[1]
    blocks = -(-length // size)
    read = table[:, :blocks].flatten()
    cached = pool.index_select(0, read)
    if exponents is not None:
        cached = dequantize(cached, exponents.index_select(0, read), query.dtype)
    cached = cached.view(rows, blocks * size, groups, 2, width)[:, :length]
    keys, values = cached.transpose(1, 2).unbind(3)
    shared = queries // positions.shape[1]
    if mask is not None:
        mask = mask[..., :length]
    elif rows > 1 or shared < queries:  # one token of one row sees all of them
        mask = torch.arange(length) <= positions[:, None, :, None]
    if mask is not None and shared < queries:
        mask = mask.repeat(1, 1, shared, 1)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
