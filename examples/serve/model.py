"""Stages: actors that hold some layers of a model and their pools of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import cg

from .attention import locate
from .families import Model
from .projections import project
from .requests import LOGPROBS, How
from .sampling import draw, greedy, score
from .work import ENTRY, POSITION, SEED, TABLE

# Columns of chunks of prompts: int64 [rows, PROMPT + 2 * tokens + blocks], where each starts and
# how many of its tokens are no padding, and `Sampling.numbers`; then the ids of the tokens, their
# entries, and the table, which is empty where all of them begin a prompt.
START, LENGTH, NUMBERS = range(3)
PROMPT = 5


@dataclass(frozen=True)
class Pool:
    """The blocks of keys and values that each layer has."""

    blocks: int
    size: int


@dataclass(frozen=True)
class Guards:
    """Checks of indices by a stage, beside those of the driver; see `Options`."""

    clamp: bool = False
    debug_bounds: bool = False


def split(layers: int, stages: int, head: float = 0.0) -> list[int]:
    """The number of layers of each stage, with the most expensive stage as cheap as possible.

    Args:
        layers: at least as many as stages.
        stages: how many.
        head: the cost of the last stage's work besides its layers, in layers.
    """

    def sizes(last: int) -> list[int]:
        base, more = divmod(layers - last, max(1, stages - 1))
        return [*(base + (stage < more) for stage in range(stages - 1)), last]

    def costs(last: int) -> list[float]:
        *rest, own = sizes(last)
        return sorted([*rest, own + head], reverse=True)

    fewest = layers if stages == 1 else 1
    return sizes(min(range(fewest, layers - stages + 2), key=costs))


@cg.actor
class Stage(nn.Module):
    """Some layers of a model, which map [rows, tokens, hidden] to the same.

    The first stage takes ids [rows, tokens], and the last gives a token for each row, int64 [rows].
    Pools are left on the meta device; `Zeros` fills them where the stage lies.
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
        self.size = pool.size
        # By entries, as they are written: TorchInductor before 2.13 would copy a tensor if a view
        # of it is written to.
        shape = (pool.blocks * pool.size, model.groups, 2, model.width)
        self.count = len(layers)
        for index in range(self.count):
            self.register_buffer(f"pool{index}", torch.empty(shape, dtype=dtype, device="meta"))

    def decode(self, x: Tensor, batch: Tensor, how: int) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """The next token of each row; with `How.SCORED` also the results of `score`.

        Args:
            x: ids int64 [rows] on the first stage, else [rows, 1, hidden].
            batch: int64 [rows, TABLE + blocks of a row]; padding has blocks 0.
            how: one of `How`.
        """
        positions, entries = batch[:, POSITION : POSITION + 1], batch[:, ENTRY]
        hidden = self._layers(x, positions, entries, batch[:, TABLE:])
        if not self.is_last:
            return hidden
        return self._tokens(hidden[:, 0], batch[:, POSITION] + 1, batch[:, SEED:TABLE], how)

    def prefill(
        self, x: Tensor, batch: Tensor, tokens: int, how: int
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """The tokens that follow chunks of prompts; with `How.SCORED` as `decode`.

        Args:
            x: ids int64 [rows, tokens] on the first stage, else [rows, tokens, hidden].
            batch: int64 [rows, PROMPT + 2 * tokens + blocks].
            tokens: how many, with padding.
            how: one of `How`.
        """
        start, length = batch[:, START : START + 1], batch[:, LENGTH : LENGTH + 1]
        steps = torch.arange(tokens, device=batch.device)[None]
        positions = torch.where(steps < length, start + steps, start)
        entries = batch[:, PROMPT + tokens : PROMPT + 2 * tokens]
        hidden = self._layers(x, positions, entries, batch[:, PROMPT + 2 * tokens :])
        if not self.is_last:
            return hidden
        last = (length - 1)[:, :, None].expand(-1, -1, hidden.shape[-1])
        hidden = hidden.gather(1, last)[:, 0]
        return self._tokens(hidden, (start + length)[:, 0], batch[:, NUMBERS:PROMPT], how)

    def _tokens(
        self, hidden: Tensor, positions: Tensor, sampling: Tensor, how: int
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """The tokens at some positions; `sampling` has the columns of `Sampling.numbers`."""
        # Of the whole vocabulary; on a mesh each rank has computed a part.
        logits = cg.layout(self.part.logits(hidden), cg.whole)
        if how == How.GREEDY:
            return greedy(logits)
        temperature, top_p = sampling[:, 2:].view(torch.float32).unbind(1)
        drawn = draw(logits, positions, sampling[:, 0], temperature, sampling[:, 1], top_p)
        if how == How.DRAWN:
            return drawn
        return drawn, *score(logits, drawn, min(LOGPROBS, self.vocabulary))

    def _layers(self, x: Tensor, positions: Tensor, entries: Tensor, tables: Tensor) -> Tensor:
        pools = tuple(getattr(self, f"pool{index}") for index in range(self.count))
        pages = locate(pools, self.size, self.first, positions, entries, tables, self.shared)
        if self.guards.debug_bounds:
            _check("a block", tables, pools[0].shape[0] // self.size)
            _check("an entry", entries, pools[0].shape[0])
            bound = tables.shape[1] * self.size or positions.shape[1]
            _check("a position", positions, bound)
        if self.is_first:
            ids = x.view(positions.shape)
            if self.guards.clamp:
                ids = ids.clamp(0, self.vocabulary - 1)
            if self.guards.debug_bounds:
                _check("a token", ids, self.vocabulary)
            x = self.part.embed(ids, positions)
        return self.part.run(x, positions, pages)


def _check(name: str, numbers: Tensor, bound: int) -> None:
    """Fail the execution unless all numbers are from 0 to below a bound, without waiting."""
    torch._assert_async(((numbers >= 0) & (numbers < bound)).all(), f"{name} is out of bounds")
