"""Stages: actors that hold some layers of a model and their pools of keys and values."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import cg

from .parts import Model, Ways
from .pools import Pool
from .requests import LOGPROBS, How
from .sampling.draw import allowed, draw, greedy, rank, score
from .sampling.records import Records
from .states import Slots
from .work import ADAPTER, ENTRY, POSITION, RECORD, SEED, STATE, TABLE

# Columns of chunks of prompts, and of rows that are verified: int64 [rows, PROMPT + 2 * tokens +
# blocks], where each starts, how many of its tokens are no padding, its slot in the pools of
# states, and `Sampling.numbers`; then the ids of the tokens, their entries, and the table, which is
# empty where all of them begin a prompt. With `How.PROMPT` the ids of the tokens behind follow, and
# with `How.ADJUSTED` the columns of `Records.load`.
START, LENGTH, PROMPT_STATE, PROMPT_ADAPTER, NUMBERS = range(5)
PROMPT = 7


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


def ranges(layers: int, stages: int, sizes: Sequence[int] | None = None) -> list[range]:
    """The layers of each stage.

    Args:
        sizes: how many each has; if None, all have alike.

    Raises:
        ValueError: the sizes do not fit, or there are fewer layers than stages.
    """
    sizes = split(layers, stages) if sizes is None else sizes
    if len(sizes) != stages or sum(sizes) != layers or min(sizes) < 1:
        raise ValueError(f"{layers} layers in {stages} stages as {tuple(sizes)}")
    return [range(a, b) for a, b in itertools.pairwise(itertools.accumulate(sizes, initial=0))]


@cg.actor
class Stage(nn.Module):
    """Some layers of a model, which map [rows, tokens, hidden] to the same.

    The first stage takes ids [rows, tokens], and the last gives a token for each row, int64 [rows].
    Pools and records are left on the meta device; `Zeros` fills them where the stage lies.

    Args:
        requests: the most that run at a time.
    """

    def __init__(
        self,
        model: Model,
        layers: range,
        pool: Pool,
        requests: int,
        dtype: torch.dtype,
        ways: Ways | None = None,
        guards: Guards | None = None,
    ) -> None:
        super().__init__()
        self.is_first = layers.start == 0
        self.is_last = layers.stop == model.layers
        self.vocabulary, self.adapters = model.vocabulary, model.adapters
        self.guards = guards or Guards()
        self.part = model.build(layers, dtype, ways or Ways())
        self.pool, self.size, self.requests = pool, pool.size, requests
        # By entries, as they are written: TorchInductor before 2.13 would copy a tensor if a view
        # of it is written to.
        self.layers = tuple(layer for layer in layers if layer in model.caches)
        for index, layer in enumerate(self.layers):
            shape = pool.shape(model.caches[layer])
            kind = torch.uint8 if pool.is_float8 else dtype
            self.register_buffer(f"pool{index}", torch.empty(shape, dtype=kind, device="meta"))
            if pool.is_float8:
                exponents = torch.empty((*shape[:-1], 2), dtype=torch.uint8, device="meta")
                self.register_buffer(f"pool_exponents{index}", exponents)
        self.states = tuple(self.part.states)
        for index, state in enumerate(self.part.states.values()):
            slots = torch.empty((1 + requests, *state.shape), dtype=state.dtype, device="meta")
            self.register_buffer(f"state{index}", slots)
        if self.is_last:
            self.records = Records(requests, model.vocabulary)

    def decode(
        self, x: Tensor, batch: Tensor, masks: Tensor | None, how: int
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """The next token of each row; with `How.SCORED` also the results of `score`.

        Args:
            x: ids int64 [rows] on the first stage, else [rows, 1, hidden].
            batch: int64 [rows, TABLE + blocks of a row]; padding has blocks 0.
            masks: int32 [rows, words] with `How.MASKED`; else None.
            how: of `How`.
        """
        positions, entries = batch[:, POSITION : POSITION + 1], batch[:, ENTRY]
        rows = batch[:, TABLE:], batch[:, STATE], batch[:, ADAPTER]
        out = self._layers(x, positions, entries, *rows, None)
        if not self.is_last:
            return out
        return self._tokens(
            *(out[:, 0], batch[:, POSITION] + 1, batch[:, SEED:RECORD], batch[:, RECORD]),
            *(masks, how),
        )

    def prefill(
        self, x: Tensor, batch: Tensor, masks: Tensor | None, tokens: int, width: int, how: int
    ) -> Tensor | tuple[Tensor, ...]:
        """The tokens that follow chunks of prompts; with `How.SCORED` as `decode`.

        With `How.PROMPT`, of one chunk, the results of `score` and `rank` for the tokens behind its
        tokens follow.

        Args:
            x: ids int64 [rows, tokens] on the first stage, else [rows, tokens, hidden].
            batch: int64 [rows, PROMPT + 2 * tokens + blocks], and more for some `how`.
            masks: as `decode`.
            tokens: how many, with padding.
            width: the number of blocks.
            how: of `How`.
        """
        length = batch[:, LENGTH : LENGTH + 1]
        end = PROMPT + 2 * tokens + width
        steps = torch.arange(tokens, device=batch.device)[None]
        wanted = steps if how & How.PROMPT else length - 1
        out = self._layers(x, *chunks(batch, tokens, width), wanted, cuts_tokens=True)
        if not self.is_last:
            return out
        behind = end + tokens if how & How.PROMPT else end
        start = batch[:, START]
        places = self.records.load(batch[:, behind:]) if how & How.ADJUSTED else start
        sampling = start + length[:, 0], batch[:, NUMBERS:PROMPT], places, masks, how
        if not how & How.PROMPT:
            return self._tokens(out[:, 0], *sampling)
        logits, following = cg.layout(out[0], cg.whole), batch[0, end:behind]
        drawn = self._tokens(logits.index_select(0, length[:, 0] - 1), *sampling)
        scores = score(logits, following, min(LOGPROBS, self.vocabulary))
        ahead = drawn if isinstance(drawn, tuple) else (drawn,)
        return *ahead, *scores, rank(logits, following)

    def verify(
        self, x: Tensor, batch: Tensor, tokens: int, how: int
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """The tokens behind each of several tokens of each row; with `How.SCORED` as `decode`.

        Args:
            x: ids int64 [rows, tokens] on the first stage, else [rows, tokens, hidden].
            batch: int64 [rows, PROMPT + 2 * tokens + blocks].
            tokens: how many, with padding.
            how: of `How`; no row's logits are adjusted, or masked.

        Returns:
            As `decode`, for rows * tokens rows.
        """
        width = batch.shape[1] - PROMPT - 2 * tokens
        positions, *where = chunks(batch, tokens, width)
        out = self._layers(x, positions, *where, None)
        if not self.is_last:
            return out
        places = positions.flatten()
        sampling = batch[:, NUMBERS:PROMPT].repeat_interleave(tokens, 0)
        return self._tokens(out.flatten(0, 1), places + 1, sampling, places, None, how)

    def _tokens(
        self,
        logits: Tensor,
        positions: Tensor,
        sampling: Tensor,
        places: Tensor,
        masks: Tensor | None,
        how: int,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """The tokens at some positions.

        Args:
            logits: [rows, vocabulary], whose log-probabilities `score` gives.
            sampling: int64 [rows, 3], `Sampling.numbers`.
            places: int64 [rows], of records; only with `How.ADJUSTED`.
            masks: as `decode`.
        """
        # Of the whole vocabulary; on a mesh each rank has computed a part.
        logits = cg.layout(logits, cg.whole)
        if masks is not None:
            logits = allowed(logits, masks)
        if how == How.GREEDY:
            return greedy(logits)
        temperature, top_p = sampling[:, 2:].view(torch.float32).unbind(1)
        adjusted, min_p = logits, None
        if how & How.ADJUSTED:
            adjusted, min_p = self.records.adjust(logits, places, positions)
        drawn = draw(adjusted, positions, sampling[:, 0], temperature, sampling[:, 1], top_p, min_p)
        if how & How.ADJUSTED:
            self.records.count(places, drawn)
        if not how & How.SCORED:
            return drawn
        return drawn, *score(logits, drawn, min(LOGPROBS, self.vocabulary))

    def _layers(
        self,
        x: Tensor,
        positions: Tensor,
        entries: Tensor,
        tables: Tensor,
        numbers: Tensor,
        adapters: Tensor,
        last: Tensor | None,
        cuts_tokens: bool = False,
    ) -> Tensor:
        pools = {layer: getattr(self, f"pool{index}") for index, layer in enumerate(self.layers)}
        states = {name: getattr(self, f"state{index}") for index, name in enumerate(self.states)}
        begins = positions[:, 0] == 0 if tables.numel() else None
        slots = Slots(states, numbers, begins)
        adapted = adapters if self.adapters else None
        exponents: dict[int, Tensor] = {}
        if self.pool.is_float8:
            names = ((layer, f"pool_exponents{at}") for at, layer in enumerate(self.layers))
            exponents = {layer: getattr(self, name) for layer, name in names}
        pages = self.pool.pages(
            *(pools, self.size, positions, entries.flatten(), tables, slots, adapted, exponents),
            cuts_tokens=cuts_tokens,
        )
        if self.guards.debug_bounds:
            _check("a block", tables, self.pool.blocks)
            _check("an entry", entries, self.pool.blocks * self.size * self.pool.ranks)
            _check("a position", positions, pages.seen)
            _check("a slot of states", numbers, 1 + self.requests)
            _check("an adapter", adapters, 1 + self.adapters)
        if self.is_first:
            x = x.view(positions.shape)
            if self.guards.clamp:
                x = x.clamp(0, self.vocabulary - 1)
            if self.guards.debug_bounds:
                _check("a token", x, self.vocabulary)
        out: Tensor = self.part(x, positions, pages, last)
        return out


def chunks(batch: Tensor, tokens: int, width: int) -> tuple[Tensor, ...]:
    """Positions, entries, tables, slots and adapters of chunks; the columns above say where.

    Args:
        tokens, width: of each chunk, with padding.
    """
    start, length = batch[:, START : START + 1], batch[:, LENGTH : LENGTH + 1]
    steps = torch.arange(tokens, device=batch.device)[None]
    positions = torch.where(steps < length, start + steps, start)
    entries = batch[:, PROMPT + tokens : PROMPT + 2 * tokens]
    tables = batch[:, PROMPT + 2 * tokens : PROMPT + 2 * tokens + width]
    return positions, entries, tables, batch[:, PROMPT_STATE], batch[:, PROMPT_ADAPTER]


def _check(name: str, numbers: Tensor, bound: int) -> None:
    """Fail the execution unless all numbers are from 0 to below a bound, without waiting."""
    torch._assert_async(((numbers >= 0) & (numbers < bound)).all(), f"{name} is out of bounds")
