"""Stages: actors that hold some layers of a model and their pools of keys and values."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import cg

from .attention import locate
from .families import Model
from .projections import project
from .sampling import draw, greedy, score

# Columns of a decode batch: int64 [rows, TABLE + blocks of a row]. An entry is where in the pools
# the keys and values of the token go, counted through all blocks.
TOKEN, POSITION, SLOT, SEED, TOP_K, ENTRY = range(6)
TABLE = 6
# Columns of a prefill chunk: int64 [1, PROMPT + 2 * tokens], ids and then entries. Its table is
# int64 [1, blocks].
START, LENGTH, CHUNK_SEED, CHUNK_TOP_K = range(4)
PROMPT = 4
# Columns of what temperatures and shares need: float32 [rows, 2].
TEMPERATURE, TOP_P = range(2)


@dataclass(frozen=True)
class Pool:
    """The blocks of keys and values that each layer has."""

    blocks: int
    size: int


@dataclass(frozen=True)
class Guards:
    """What a stage does about indices, which the driver has checked before; see `Options`."""

    clamp: bool = False
    debug_bounds: bool = False


def split(layers: int, stages: int) -> list[range]:
    """Contiguous, nearly equal parts of the layers; the last ones are the smaller.

    The last stage has the head to compute as well.
    """
    base, more = divmod(layers, stages)
    bounds = [0]
    for stage in range(stages):
        bounds.append(bounds[-1] + base + (stage < more))
    return [range(a, b) for a, b in itertools.pairwise(bounds)]


@cg.actor
class Stage(nn.Module):
    """Some layers of a model, [rows, tokens] ids or [rows, tokens, hidden] to the same.

    The first stage takes ids, and the last gives a token for each row, int64 [rows].
    """

    def __init__(
        self,
        model: Model,
        layers: range,
        pool: Pool,
        dtype: torch.dtype,
        packs: bool = True,
        guards: Guards | None = None,
    ) -> None:
        super().__init__()
        self.is_first = layers.start == 0
        self.is_last = layers.stop == model.layers
        self.first = layers.start
        self.vocabulary = model.vocabulary
        self.guards = guards or Guards()
        self.shared = model.heads // model.groups
        self.part = model.build(layers, dtype)
        if packs:
            project(self.part)
        shape = (pool.blocks, pool.size, model.groups, 2, model.width)
        self.count = len(layers)
        for index in range(self.count):
            self.register_buffer(f"pool{index}", torch.zeros(shape, dtype=dtype))

    def decode(
        self, x: Tensor, batch: Tensor, controls: Tensor | None = None, logprobs: int | None = None
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """The next token of each row; with `logprobs` that, and what `score` gives.

        Args:
            x: ids int64 [rows] on the first stage, else [rows, 1, hidden].
            batch: int64 [rows, TABLE + blocks of a row]; padding has blocks 0.
            controls: float32 [rows, 2], temperature and top_p; None if all rows are greedy.
            logprobs: of how many of the likeliest tokens.
        """
        positions, entries = batch[:, POSITION : POSITION + 1], batch[:, ENTRY]
        hidden = self._layers(x, positions, entries, batch[:, TABLE:])
        if not self.is_last:
            return hidden
        logits = self._logits(hidden[:, 0])
        if controls is None:
            return greedy(logits)
        seeds, top_k = batch[:, SEED], batch[:, TOP_K]
        at = batch[:, POSITION] + 1
        drawn = draw(logits, at, seeds, controls[:, TEMPERATURE], top_k, controls[:, TOP_P])
        return drawn if logprobs is None else (drawn, *score(logits, drawn, logprobs))

    def prefill(
        self,
        x: Tensor,
        chunk: Tensor,
        table: Tensor,
        controls: Tensor,
        logprobs: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """The token that follows a chunk of one prompt; with `logprobs` as `decode`.

        Args:
            x: ids int64 [1, tokens] on the first stage, else [1, tokens, hidden].
            chunk: int64 [1, PROMPT + 2 * tokens]: where it starts, how many tokens are no padding;
                the ids of the tokens, and their entries.
            table: int64 [1, blocks].
            controls: float32 [1, 2].
        """
        start, length = chunk[:, START : START + 1], chunk[:, LENGTH : LENGTH + 1]
        count = (chunk.shape[1] - PROMPT) // 2
        steps = torch.arange(count, device=chunk.device)[None]
        positions = torch.where(steps < length, start + steps, start)
        hidden = self._layers(x, positions, chunk[:, PROMPT + count :], table)
        if not self.is_last:
            return hidden
        last = (length - 1)[:, :, None].expand(-1, -1, hidden.shape[-1])
        logits = self._logits(hidden.gather(1, last)[:, 0])
        seeds, top_k = chunk[:, CHUNK_SEED], chunk[:, CHUNK_TOP_K]
        at = (start + length)[:, 0]
        drawn = draw(logits, at, seeds, controls[:, TEMPERATURE], top_k, controls[:, TOP_P])
        return drawn if logprobs is None else (drawn, *score(logits, drawn, logprobs))

    def _logits(self, hidden: Tensor) -> Tensor:
        """The logits of the whole vocabulary, of which each rank computes a part."""
        return cg.layout(self.part.logits(hidden), cg.whole)

    def _layers(self, x: Tensor, positions: Tensor, entries: Tensor, tables: Tensor) -> Tensor:
        pools = tuple(getattr(self, f"pool{index}") for index in range(self.count))
        pages = locate(pools, self.first, positions, entries, tables, self.shared)
        if self.guards.debug_bounds:
            _check("a block", tables, pools[0].shape[0])
            _check("an entry", entries, pools[0].shape[0] * pools[0].shape[1])
            _check("a position", positions, tables.shape[1] * pools[0].shape[1])
        if self.is_first:
            ids = x.view(positions.shape)
            if self.guards.clamp:
                ids = ids.clamp(0, self.vocabulary - 1)
            if self.guards.debug_bounds:
                _check("a token", ids, self.vocabulary)
            x = self.part.embed(ids, positions)
        return self.part.run(x, positions, pages)


def _check(what: str, numbers: Tensor, bound: int) -> None:
    """Fail the execution unless all are from 0 to below a bound; on devices without waiting."""
    torch._assert_async(((numbers >= 0) & (numbers < bound)).all(), f"{what} is out of bounds")
