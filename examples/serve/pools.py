"""The pools of blocks that the layers of a stage have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .pages import Pages
from .parts import KeyValues
from .spread import SpreadPages


@dataclass(frozen=True)
class Pool:
    """The blocks of keys and values that each layer has.

    Attributes:
        blocks: how many.
        size: tokens of a block.
        is_float8: whether keys and values are in float8, with scales.
        ranks: over which blocks are spread, each with `size` tokens of a block.
    """

    blocks: int
    size: int
    is_float8: bool = False
    ranks: int = 1

    def shape(self, kept: KeyValues) -> tuple[int, ...]:
        """The shape of the pool of a layer, by entries."""
        entries = self.blocks * self.size, kept.groups, kept.key + kept.value
        return (self.ranks, *entries) if self.ranks > 1 else entries

    def pages(self, *batch: Any, cuts_tokens: bool) -> Pages:
        """The pages of a batch; the arguments are those of `Pages`, and of `SpreadPages`."""
        if self.ranks == 1:
            return Pages(*batch)
        return SpreadPages(*batch, ranks=self.ranks, cuts_tokens=cuts_tokens)
