"""The pools of keys and values of a stage, as a batch reads and writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .float8_cache import dequantize, quantize
from .states import NO_SLOTS, Slots


@dataclass(frozen=True)
class Pages:
    """Where the tokens of a batch lie in the pools of blocks; the same for all layers of a stage.

    States of layers that keep some lie in slots.

    Attributes:
        pools: of each layer that has one, by its number in the model: [blocks * size, kv heads,
            width of a key + width of a value]; uint8 where they are in float8.
        size: entries of a block.
        positions: int64 [rows, tokens].
        entries: int64 [rows * tokens], the entry of each new token, counted through all blocks; 0
            for padding.
        tables: int64 [rows, blocks of a row]; of no blocks where all rows begin a sequence, which
            see nothing in the pools.
        slots: of the rows.
        adapters: int64 [rows], the adapter of each, counted from 1; 0: none. None where no row has
            one.
        exponents: of the scales of keys and of values in float8, uint8 [blocks * size, kv heads,
            2], by layer; empty where pools have plain numbers.
        blocks: the tables, int64 [rows * blocks of a row]. They are made here, and not by the first
            layer that asks for them, so that layers of a class are alike.
    """

    pools: Mapping[int, Tensor]
    size: int
    positions: Tensor
    entries: Tensor
    tables: Tensor
    slots: Slots = NO_SLOTS
    adapters: Tensor | None = None
    exponents: Mapping[int, Tensor] = field(default_factory=dict)
    blocks: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", self.tables.flatten())

    @property
    def seen(self) -> int:
        """How many keys a row is shown: those of its blocks, or its own."""
        return self.tables.shape[1] * self.size or self.positions.shape[1]

    def pool(self, layer: int) -> Tensor:
        """The pool of a layer by blocks, [blocks, size, kv heads, width of both]."""
        return self._by_blocks(self.pools[layer])

    def exponents_of(self, layer: int) -> Tensor | None:
        """A layer's exponents by blocks, uint8 [blocks, size, kv heads, 2]; None if it has none."""
        return self._by_blocks(self.exponents[layer]) if layer in self.exponents else None

    def _by_blocks(self, entries: Tensor) -> Tensor:
        return entries.view(-1, self.size, *entries.shape[1:])

    def _shown(self, by_blocks: Tensor) -> Tensor:
        """The entries that rows are shown of a pool, [rows, kv heads, `seen`, width of both]."""
        shown = by_blocks.index_select(0, self.blocks)
        return shown.view(len(self.tables), -1, *by_blocks.shape[2:]).transpose(1, 2)

    def write(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Write keys and values to the layer's pool.

        Args:
            key, value: [rows, kv heads, tokens, width].
            layer: its number in the model.

        Returns:
            All keys and values that the rows are shown, [rows, kv heads, `seen`, width].
        """
        keys, values = self.keep(key, value, layer)
        if not self.tables.numel():
            return keys, values
        widths = key.shape[-1], value.shape[-1]
        keys, values = self._shown(self.pool(layer)).split(widths, -1)
        exponents = self.exponents_of(layer)
        if exponents is None:
            return keys, values
        powers = self._shown(exponents).unbind(-1)
        return dequantize(keys, powers[0], key.dtype), dequantize(values, powers[1], key.dtype)

    def keep(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Write keys and values to the layer's pool; give them as they are there.

        In float8 they are rounded, those of a prompt that begins, too: its tokens do not depend on
        its chunks.
        """
        if layer not in self.exponents:
            self._put(self.pools[layer], torch.cat([key, value], -1))
            return key, value
        (keys, of_keys), (values, of_values) = quantize(key), quantize(value)
        self._put(self.pools[layer], torch.cat([keys, values], -1))
        self._put(self.exponents[layer], torch.stack([of_keys, of_values], -1))
        return dequantize(keys, of_keys, key.dtype), dequantize(values, of_values, key.dtype)

    def _put(self, pool: Tensor, new: Tensor) -> None:
        """Write what tokens have to a pool, [rows, kv heads, tokens, numbers]."""
        rows, groups, tokens, numbers = new.shape
        entries = new.transpose(1, 2).reshape(rows * tokens, groups, numbers)
        pool.index_copy_(0, self.entries, entries)
