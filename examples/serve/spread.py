"""Pages whose blocks lie on several ranks, which share a sequence.

A block is a run of tokens on each rank of an axis `cp`, one after the other: the first run of a
sequence is on the first rank, the next one on the next. Each rank attends to its own keys, and the
results are joined by their statistics. Of a chunk of a prompt each rank has some tokens, so all but
attention is shared; all ranks need its keys, to write their own, and its queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

import cg

from .pages import Pages
from .partial_attention import attend_parts


@dataclass(frozen=True)
class SpreadPages(Pages):
    """Where the tokens of a batch lie in pools that are spread over ranks.

    Pools have a dimension of ranks in front: [ranks, blocks * size, kv heads, width of both]. A
    block has `size` entries on each rank.

    Attributes:
        ranks: how many.
        cuts_tokens: whether each rank has some of the new tokens, of which there are many.
    """

    ranks: int = 1
    cuts_tokens: bool = False

    @property
    def seen(self) -> int:
        return self.tables.shape[1] * self.size * self.ranks or self.positions.shape[1]

    @cached_property
    def numbers(self) -> Tensor:
        """The numbers of the ranks, int64 [ranks, 1]."""
        return torch.arange(self.ranks, device=self.positions.device)[:, None]

    @cached_property
    def places(self) -> Tensor:
        """The entries of new tokens on each rank, int64 [ranks, rows * tokens]; 0 on others."""
        run, at = self.entries // self.size, self.entries % self.size
        own = run // self.ranks * self.size + at
        return torch.where(run % self.ranks == self.numbers, own, torch.zeros_like(own))

    @cached_property
    def last(self) -> Tensor:
        """The last key of each rank that new tokens see, int64 [ranks, rows * tokens].

        Keys are counted in a row's blocks on that rank; -1: the tokens see none of them.
        """
        positions, span = self.positions.flatten(), self.size * self.ranks
        more = (positions % span + 1 - self.numbers * self.size).clamp(0, self.size)
        return positions // span * self.size + more - 1

    def write(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Write keys and values to the ranks that have their places.

        Returns:
            The same, of all new tokens. Those in pools are read by `attend` alone.
        """
        if self.cuts_tokens:
            widths = key.shape[-1], value.shape[-1]
            key, value = self._of_all(torch.cat([key, value], -1)).split(widths, -1)
        return self.keep(key, value, layer)

    def _put(self, pool: Tensor, new: Tensor) -> None:
        rows, groups, tokens, numbers = new.shape
        entries = new.transpose(1, 2).reshape(rows * tokens, groups, numbers)
        pool.index_put_((self.numbers, self.places), entries)

    def _of_all(self, own: Tensor) -> Tensor:
        """A tensor [rows, heads, tokens, width] with the tokens of all ranks."""
        return cg.layout(own, cg.cut(1, "tp")) if self.cuts_tokens else own

    def attend(
        self,
        query: Tensor,
        layer: int,
        mask: Tensor | None,
        scale: float,
        cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend to the keys of all ranks.

        Args:
            query: [rows, heads, tokens, width].
            layer: its number in the model.
            mask: [rows, 1, tokens, `seen`], which is added to products; None: a token sees all
                those before it.
            scale: of the products.
            cap: of products; see `attend_parts`.
            sinks: [heads], logits of keys without values.

        Returns:
            [rows, tokens, heads, width of a value].
        """
        rows, heads, tokens, width = query.shape
        pool = self.pools[layer].unflatten(1, (-1, self.size))
        groups = pool.shape[3]
        shared = heads // groups
        out, statistics = attend_parts(
            self._of_all(query).reshape(rows, groups, shared * tokens, width),
            *(pool, self.blocks, self.last, scale),
            exponents=self._by_runs(layer),
            mask=None if mask is None else self._of_ranks(mask),
            cap=cap,
        )
        # All that ranks exchange to join their parts: each needs those of its own tokens.
        parts = torch.cat([out.float(), statistics[..., None]], -1)
        parts = parts.view(self.ranks, rows, groups, shared, tokens, -1)
        own = cg.cut(2, "tp") & cg.cut(4, "cp") if self.cuts_tokens else cg.cut(2, "tp")
        parts = cg.layout(parts, own)
        out, statistics = parts[..., :-1], parts[..., -1]
        if sinks is not None:  # as a part of zeros
            of_heads = sinks.float().view(1, 1, groups, shared, 1)
            others = of_heads.expand(1, rows, -1, -1, tokens)
            statistics = torch.cat([statistics, others])
        weights = statistics.softmax(0)[: self.ranks]
        mixed = (out * weights[..., None]).sum(0).view(rows, heads, tokens, -1)
        return mixed.to(query.dtype).transpose(1, 2)

    def _by_runs(self, layer: int) -> Tensor | None:
        if layer not in self.exponents:
            return None
        return self.exponents[layer].unflatten(1, (-1, self.size))

    def _of_ranks(self, mask: Tensor) -> Tensor:
        """The columns of a mask that each rank has keys for, [ranks, rows, 1, tokens, keys]."""
        runs = mask.unflatten(-1, (-1, self.ranks, self.size))
        return runs.permute(4, 0, 1, 2, 3, 5).flatten(-2)
