"""The mask of a dropout as a function of a key and of an entry's place.

Whoever computes a part of a tensor can compute the same part of its mask, and again when it likes.
The numbers are those of Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as
easy as 1, 2, 3", SC 2011), which torch's generator on GPUs is, too: ten rounds turn a counter of
four words of 32 bits, and a key of two, into four random words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ....ir.layout import Interval, Intervals, indices_at

Words: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""Four numbers below 2**32, as int64."""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = (1 << 32) - 1
_WORDS = 4
"""The random words of a counter."""


def philox(counter: Words, key: Tensor) -> Words:
    """Four random words of each counter.

    Args:
        counter: its words; they are broadcast. The first rounds compute each combination of words
            once, so a grid of counters is best given by its axes.
        key: int64 `[2]`, two words.
    """
    a, b, c, d = counter
    low, high = key.unbind()
    for _ in range(_ROUNDS):
        # A product of two words wraps around in int64, which leaves its 64 bits as they are.
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, c = ((second >> 32) ^ (b ^ low)) & _LOW, ((first >> 32) ^ (d ^ high)) & _LOW
        b, d = second & _LOW, first & _LOW
        low, high = (low + _KEY_STEPS[0]) & _LOW, (high + _KEY_STEPS[1]) & _LOW
    return a, b, c, d


@dataclass(frozen=True)
class RandomMask:
    """The scores of attention that a dropout keeps.

    The random word of a score is one of the counter `(key index // 4, query index, head, batch)`.

    Attributes:
        key: int64 `[2]`, two words.
        rate: the share of scores that are dropped.
        batch, heads, rows, columns: the indices, of the whole, of the scores that a rank has.
    """

    key: Tensor
    rate: float
    batch: Intervals
    heads: Intervals
    rows: Intervals
    columns: Intervals

    @property
    def factor(self) -> float:
        """The factor of what is kept."""
        return 0.0 if self.rate == 1 else 1 / (1 - self.rate)

    def axes(self) -> tuple[Tensor, Tensor, Tensor]:
        """The indices of the batch, the heads and the rows, each along its dimension of four."""
        batch, heads, rows = map(self._indices, (self.batch, self.heads, self.rows))
        return batch[:, None, None, None], heads[:, None, None], rows[:, None]

    def _indices(self, intervals: Intervals) -> Tensor:
        runs = [torch.arange(*interval, device=self.key.device) for interval in intervals]
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    def tile(self, axes: tuple[Tensor, Tensor, Tensor], columns: Interval) -> Tensor:
        """Whether each score is kept, for some of the columns.

        Args:
            axes: some of `axes()`.
            columns: the first place, and the one behind the last, among those of the rank.
        """
        parts = [self._of_run(axes, *run) for run in indices_at(self.columns, columns)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _of_run(self, axes: tuple[Tensor, Tensor, Tensor], start: int, stop: int) -> Tensor:
        batch, heads, rows = axes
        first = start // _WORDS
        groups = torch.arange(first, -(-stop // _WORDS), device=self.key.device)
        counter = (groups, rows, heads, batch)
        words = torch.broadcast_tensors(*philox(counter, self.key))  # type: ignore[no-untyped-call]
        of_columns = torch.stack(words, -1).flatten(-2)
        at = start - first * _WORDS
        return of_columns[..., at : at + stop - start] >= round(self.rate * (1 << 32))
