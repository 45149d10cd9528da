"""Attention over a paged key-value cache, as one function that transformers' layers call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

NAME = "cg_paged"
"""Of the function in transformers' table of attention functions."""

TRASH = 0
"""The block that padding is written to; no request has it."""


@dataclass(frozen=True)
class Pages:
    """Where the tokens of a batch lie in the pools of blocks; the same for all layers of a stage.

    Attributes:
        pools: of each layer of the stage, [blocks, block_size, 2, heads, width]: keys and values.
        first: the number of the stage's first layer in the model.
        entries: int64 [rows * tokens], the entry of each new token, counted through all blocks.
        tables: int64 [rows * blocks of a row].
        mask: [rows, 1, tokens, entries of a row], 0 where a token sees an entry, else -inf; the
            tokens are there once for each of the heads that share keys.
    """

    pools: tuple[Tensor, ...]
    first: int
    entries: Tensor
    tables: Tensor
    mask: Tensor


def locate(
    pools: tuple[Tensor, ...],
    first: int,
    positions: Tensor,
    tables: Tensor,
    valid: Tensor | None,
    shared: int,
) -> Pages:
    """Find where new tokens go, and what each of them sees.

    Args:
        pools, first: as in `Pages`.
        positions: int64 [rows, tokens].
        tables: int64 [rows, blocks of a row].
        valid: bool [rows, tokens]; false for padding, which is written to the trash. None if all
            are true; the trash is all that a row of padding has then.
        shared: how many heads share keys.
    """
    size = pools[0].shape[1]
    block = tables.gather(1, positions // size)
    entries = block * size + positions % size
    if valid is not None:
        entries = torch.where(valid, entries, TRASH)
    seen = torch.arange(tables.shape[1] * size, device=tables.device)
    hidden = seen > positions[:, :, None]
    mask = torch.zeros(hidden.shape, dtype=pools[0].dtype, device=tables.device)
    mask = mask.masked_fill(hidden, -torch.inf)[:, None]
    if mask.shape[2] > 1:  # a single token's is expanded where it is used
        mask = mask.repeat(1, 1, shared, 1)
    return Pages(pools, first, entries.flatten(), tables.flatten(), mask)


def attend(query: Tensor, key: Tensor, value: Tensor, pages: Pages, layer: int, scale: float):
    """Write keys and values to the layer's pool, and attend to all that the rows' blocks hold.

    Args:
        query: [rows, heads, tokens, width].
        key, value: [rows, kv heads, tokens, width].
        pages: where they go.
        layer: its number in the model.
        scale: of the products.

    Returns:
        [rows, tokens, heads, width].
    """
    rows, heads, tokens, width = query.shape
    pool = pages.pools[layer - pages.first]
    blocks, size, _, groups, _ = pool.shape
    new = torch.stack([key, value], 1).permute(0, 3, 1, 2, 4)  # [rows, tokens, 2, groups, width]
    pool.view(blocks * size, -1).index_copy_(0, pages.entries, new.reshape(rows * tokens, -1))
    held = pool.view(blocks, -1).index_select(0, pages.tables)
    held = held.view(rows, -1, 2, groups, width).permute(2, 0, 3, 1, 4)
    # Heads that share keys are rows of one product: [rows, groups, shared * tokens, width].
    shared = heads // groups
    query = query.reshape(rows, groups, shared * tokens, width)
    mixed = F.scaled_dot_product_attention(
        query, held[0], held[1], attn_mask=pages.mask, scale=scale
    )
    if tokens == 1:  # with plain strides, for a product of plain matrices comes next
        return mixed.view(rows, 1, heads, width)
    return mixed.view(rows, heads, tokens, width).transpose(1, 2)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    pages: Pages | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`attend`, as transformers calls it; a layer passes its keyword `pages` on to it."""
    assert pages is not None, "a layer of a stage is called with pages"
    assert attention_mask is None, "pages say what each token sees"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(query, key, value, pages, module.layer_idx, scale), None
