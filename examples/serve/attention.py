"""Attention over a paged key-value cache, as one function that all layers call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from . import paged

TRASH = 0
"""The block that padding is written to; no request has it."""


@dataclass(frozen=True)
class Pages:
    """Where the tokens of a batch lie in the pools of blocks; the same for all layers of a stage.

    Attributes:
        pools: of each layer of the stage, [blocks * size, kv heads, 2, width]: keys, values.
        size: entries of a block.
        first: the number of the stage's first layer in the model.
        entries: int64 [rows * tokens], the entry of each new token, counted through all blocks.
        tables: int64 [rows * blocks of a row]; empty where all rows begin a sequence, which see
            nothing in the pools.
        mask: [rows, 1, tokens, entries of a row], 0 where a token sees an entry, else -inf. Each
            token is repeated for the heads that share keys. None where a device's kernels read the
            blocks in place, for one token a row; and where sequences begin, since their tokens see
            those before them.
        positions: int64 [rows * tokens].
    """

    pools: tuple[Tensor, ...]
    size: int
    first: int
    entries: Tensor
    tables: Tensor
    mask: Tensor | None
    positions: Tensor


def locate(
    pools: tuple[Tensor, ...],
    size: int,
    first: int,
    positions: Tensor,
    entries: Tensor,
    tables: Tensor,
    shared: int,
) -> Pages:
    """Locate the tokens of a batch, and the entries that each of them sees.

    Args:
        pools, size, first: as in `Pages`.
        positions: int64 [rows, tokens].
        entries: int64 [rows, tokens], where their keys and values go; 0 for padding.
        tables: int64 [rows, blocks of a row]; of no blocks where all begin a sequence.
        shared: how many heads share keys.
    """
    dtype, device = pools[0].dtype, tables.device
    mask = None
    if tables.shape[1] and not (positions.shape[1] == 1 and paged.is_served(device)):
        seen = torch.arange(tables.shape[1] * size, device=device)
        shut = torch.full((), -torch.inf, dtype=dtype, device=device)
        mask = torch.where(seen > positions[:, :, None], shut, torch.zeros_like(shut))[:, None]
        if mask.shape[2] > 1:  # a single token's is expanded where it is used
            mask = mask.repeat_interleave(shared, 2)
    flat = (entries.flatten(), tables.flatten(), mask, positions.flatten())
    return Pages(pools, size, first, *flat)


def attend(query: Tensor, new: Tensor, pages: Pages, layer: int, scale: float) -> Tensor:
    """Write keys and values to the layer's pool, and attend to all that the rows' blocks hold.

    Args:
        query: [rows, tokens, kv heads, heads that share one, width].
        new: keys and values, [rows, tokens, kv heads, 2, width].
        pages: where they go.
        layer: its number in the model.
        scale: of the products.

    Returns:
        [rows, tokens, heads * width].
    """
    rows, tokens, groups, shared, width = query.shape
    entries = pages.pools[layer - pages.first]
    entries.index_copy_(0, pages.entries, new.reshape(rows * tokens, groups, 2, width))
    if not pages.tables.numel():
        key, value = new.transpose(1, 2).unbind(3)
        query = query.permute(0, 2, 3, 1, 4).reshape(rows, groups * shared, tokens, width)
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=shared > 1
        )
        return mixed.transpose(1, 2).reshape(rows, tokens, groups * shared * width)
    pool = entries.view(-1, pages.size, groups, 2, width)
    if pages.mask is None:
        mixed = torch.ops.cg_paged.attend(query[:, 0], pool, pages.tables, pages.positions, scale)
        return mixed.view(rows, 1, groups * shared * width)
    cached = pool.index_select(0, pages.tables).view(rows, -1, groups, 2, width)
    key, value = cached.transpose(1, 2).unbind(3)
    # Heads that share keys are rows of one product: [rows, groups, tokens * shared, width].
    query = query.transpose(1, 2).reshape(rows, groups, tokens * shared, width)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=pages.mask, scale=scale)
    mixed = mixed.view(rows, groups, tokens, shared, width).transpose(1, 2)
    # Two reshapes, since matrix products copy where a stride does not fit, even that of one token.
    flat = mixed.reshape(rows * tokens, groups * shared * width)
    return flat.view(rows, tokens, groups * shared * width)
