"""The engine: stages of a model on all ranks, driven by rank 0 through graphs that cg has compiled.

A decode batch is an execution of the graph of its group, a prefill chunk one of the prefill graph.
Each graph has a variant for each bucket, all of which have run before the engine is ready. The
tokens of a batch go from the last stage to the first by the group's carry, and to the driver beside
it, so the next batch of the group may be submitted before the results of this one are known.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

import cg

from .families import GptConfig, Model, open_model
from .model import LENGTH, PROMPT, SLOT, TABLE, TOKEN, Guards, Pool, Stage, split
from .work import LOGPROBS, Decode, Limits, Prefill, Sampling, Scores

log = logging.getLogger("serve")

WARM_UPS = 3
"""Executions of each variant in each context; the third records it where devices can."""
SAYING = 10.0
"""Seconds between two lines of the log on how far warming is."""


@dataclass(frozen=True)
class Options:
    """How a model is served; equal on all ranks.

    Attributes:
        groups: decode batches at a time; one for each rank if None.
        batches: the sizes of decode batches that are compiled, ascending.
        chunks: the lengths of prefill chunks that are compiled, ascending.
        blocks: of each pool, the trash included.
        block_size: tokens in a block.
        context: the longest sequence; that of the model if None.
        widths: the lengths of block tables that are compiled, ascending; a quarter of the context
            and the context if None.
        in_flight: executions of a graph at a time.
        dtype: of weights and pools.
        fuse: as `compile` takes it.
        passes: as `compile` takes them.
        seed: of random weights.
        warm: whether all variants run before the engine is ready.
        clamp: whether the graph clamps ids to the vocabulary, beside the checks of the driver.
        debug_bounds: whether it checks ids, positions and blocks; an execution fails otherwise.
        via: what activations and tokens travel by from stage to stage, as `cg.via` takes it.
        draws: whether decode batches with a temperature are taken; without, half as many variants
            are compiled.
        tp: ranks that hold a stage together, each a part of its heads, of its hidden units and of
            the vocabulary.
    """

    groups: int | None = None
    batches: tuple[int, ...] = (1, 2, 4, 8)
    chunks: tuple[int, ...] = (32, 128)
    blocks: int = 256
    block_size: int = 16
    context: int | None = None
    widths: tuple[int, ...] | None = None
    in_flight: int = 2
    dtype: torch.dtype = torch.float32
    fuse: str | None = None
    passes: str = ""
    seed: int = 0
    warm: bool = True
    clamp: bool = False
    debug_bounds: bool = False
    via: str = "auto"
    draws: bool = True
    tp: int = 1


class Tokens:
    """The result of a piece of work: tokens, and log-probabilities if its variant gives some."""

    def __init__(self, future: cg.Future, count: int) -> None:
        self._future = future
        self._count = count

    def done(self) -> bool:
        """Move the engine on, without waiting; true if the tokens are known."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> list[int]:
        """The tokens; errors are those of `cg.Future.result`."""
        return self._parts(timeout)[0][: self._count].tolist()

    def scores(self) -> list[Scores]:
        """Of each token, once the result is there; empty unless the work asked for some."""
        _, *found = self._parts()
        if not found:
            return []
        values, tokens = (each[: self._count].tolist() for each in found)
        return [
            Scores(drawn, tuple(zip(row, rest, strict=True)))
            for (drawn, *rest), row in zip(values, tokens, strict=True)
        ]

    def when_done(self, call: Callable[[], None]) -> None:
        """Call back when the work has ended, in the thread that moves the engine on."""
        self._future.add_done_callback(lambda _: call())

    def _parts(self, timeout: float | None = None) -> tuple[Tensor, ...]:
        """Tokens, and with log-probabilities what `sampling.score` gives."""
        return _tuple(self._future.result(timeout))


class DeviceTokens(Tokens):
    """The same on a device, where an execution has ended when its work is on streams.

    Its tokens are copied to the host behind it and ahead of the next execution, which whoever asks
    for these would otherwise wait for as well.
    """

    def __init__(self, future: cg.Future, count: int) -> None:
        super().__init__(future, count)
        self._host: tuple[Tensor, ...] = ()
        self._there: torch.Event | None = None
        future.add_done_callback(self._fetch)

    def _parts(self, timeout: float | None = None) -> tuple[Tensor, ...]:
        parts = super()._parts(timeout)
        if self._there is None:
            return parts
        self._there.synchronize()
        return self._host

    def _fetch(self, future: cg.Future) -> None:
        if future.exception() is None:
            parts = _tuple(future.result())
            self._host = tuple(
                torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts
            )
            for host, part in zip(self._host, parts, strict=True):
                host.copy_(part, non_blocking=True)
            self._there = torch.Event(parts[0].device)
            self._there.record()


class CgEngine:
    """Rank 0's end of the engine; `start` makes it."""

    def __init__(
        self,
        limits: Limits,
        options: Options,
        decode: Sequence[cg.Compiled],
        prefill: cg.Compiled,
        on_device: bool = False,
    ) -> None:
        self.limits = limits
        self._is_on_device = on_device
        self._tokens = DeviceTokens if on_device else Tokens
        self.decode = tuple(decode)
        self.prefill = prefill
        self.options = options
        self._widths = widths(limits, options)
        self._closed = False

    def submit(self, work: Decode | Prefill) -> Tokens:
        """Start a piece of work; waits if `Options.in_flight` are under way in its graph.

        Raises:
            ValueError: it is outside of the limits; nothing was started.
        """
        return self._decode(work) if isinstance(work, Decode) else self._prefill(work)

    def close(self) -> None:
        """End what is in flight, then the ranks; idempotent."""
        for graph in (*self.decode, self.prefill):
            graph.close()

    def warm(self) -> None:
        """Run each variant in each of its contexts, on trash."""
        decodes = list(decode_variants(self.limits, self.options))
        work = [(graph, example) for graph in self.decode for example in decodes]
        chunks = prefill_variants(self.limits, self.options)
        work += [(self.prefill, example) for example in chunks]
        said = monotonic()
        for number, (graph, example) in enumerate(work):
            if monotonic() > said + SAYING:
                log.info("warms the engine: %d of %d variants have run", number, len(work))
                said = monotonic()
            for _ in range(WARM_UPS):
                futures = [graph.execute(*example) for _ in range(self.options.in_flight)]
                for future in futures:
                    future.result()

    def _decode(self, work: Decode) -> Tokens:
        limits, rows = self.limits, work.rows
        _check(0 <= work.group < limits.groups, f"group {work.group} of {limits.groups}")
        _check(0 < len(rows) <= limits.slots, f"{len(rows)} rows of at most {limits.slots}")
        size = limits.block_size
        needed = [row.position // size + 1 for row in rows]
        scored = _scored(limits, (row.sampling for row in rows))
        width = _bucket(self._lengths(scored), max(needed))
        numbers = array("q")
        for row in rows:
            _check(-1 <= row.token < limits.vocabulary, f"token {row.token}")
            _check(0 <= row.slot < limits.slots, f"slot {row.slot}")
            table = self._table(row.blocks, row.position + 1, width)
            entry = table[row.position // size] * size + row.position % size
            sampling = row.sampling
            head = (row.token, row.position, row.slot, sampling.seed, sampling.top_k, entry)
            numbers.extend(head)
            numbers.extend(table)
        batches = self.options.batches
        count = _bucket(batches if scored is None else batches[-1:], len(rows))
        numbers.extend(([0, 0, limits.slots, 0, 0, 0] + [0] * width) * (count - len(rows)))
        batch = torch.frombuffer(numbers, dtype=torch.int64).view(count, TABLE + width)
        if self._is_on_device:
            batch = batch.pin_memory()  # other memory is copied once the device comes to it
        graph = self.decode[work.group]
        if scored is None and all(row.sampling.temperature == 0 for row in rows):
            return self._tokens(graph.execute(batch, None, None), len(rows))
        _check(self.options.draws, "a temperature or log-probabilities, without `draws`")
        samplings = [row.sampling for row in rows] + [Sampling()] * (count - len(rows))
        return self._tokens(graph.execute(batch, _controls(samplings), scored), len(rows))

    def _prefill(self, work: Prefill) -> Tokens:
        limits, length = self.limits, len(work.tokens)
        _check(0 < length <= limits.chunk, f"{length} tokens of at most {limits.chunk}")
        _check(work.start >= 0, f"a chunk from {work.start}")
        for token in work.tokens:
            _check(0 <= token < limits.vocabulary, f"token {token}")
        end = work.start + length
        scored = _scored(limits, (work.sampling,)) if work.last else None
        width = _bucket(self._lengths(scored), -(-end // limits.block_size))
        table = self._table(work.blocks, end, width)
        count = _bucket(self.options.chunks, length)
        sampling = work.sampling
        numbers = [work.start, length, sampling.seed, sampling.top_k, *work.tokens]
        numbers += [0] * (count - length)
        size = limits.block_size
        numbers += (table[at // size] * size + at % size for at in range(work.start, end))
        numbers += [0] * (count - length)
        chunk = torch.tensor([numbers])
        future = self.prefill.execute(chunk, torch.tensor([table]), _controls([sampling]), scored)
        return self._tokens(future, 1 if work.last else 0)

    def _lengths(self, scored: int | None) -> tuple[int, ...]:
        """The lengths of tables of these variants, ascending."""
        return self._widths if scored is None else self._widths[-1:]

    def _table(self, blocks: Sequence[int], tokens: int, width: int) -> list[int]:
        """The blocks that hold so many tokens, filled up with trash."""
        limits = self.limits
        needed = -(-tokens // limits.block_size)
        _check(tokens <= limits.context, f"{tokens} tokens of at most {limits.context}")
        _check(len(blocks) >= needed, f"{len(blocks)} blocks for {tokens} tokens")
        table = list(blocks[:needed])
        _check(min(table) > 0 and max(table) < limits.blocks, f"blocks {table}")
        return table + [0] * (width - needed)


def start(
    source: Path | str | PretrainedConfig | GptConfig, options: Options | None = None
) -> CgEngine | None:
    """Start the engine; collective.

    Args:
        source: a folder, or a configuration for random weights; see `open_model`.
        options: the same on all ranks.

    Returns:
        The engine on rank 0, once all variants have run. None on other ranks, which serve until
        rank 0 has closed it.

    Raises:
        FileNotFoundError, ValueError: as `open_model`; or the options do not fit the model.
    """
    options = Options() if options is None else options
    model = open_model(Path(source) if isinstance(source, str) else source, options.seed)
    _check(cg.world_size() % options.tp == 0, f"{cg.world_size()} ranks by {options.tp}")
    _check(model.groups % options.tp == 0, f"{model.groups} heads of keys by {options.tp}")
    count = cg.world_size() // options.tp
    context = min(model.context, options.context or model.context)
    limits = Limits(
        groups=options.groups or count,
        slots=options.batches[-1],
        chunk=min(options.chunks[-1], context),
        blocks=options.blocks,
        block_size=options.block_size,
        context=context,
        vocabulary=model.vocabulary,
        eos=model.eos,
    )
    _check(model.layers >= count, f"{model.layers} layers in {count} stages")
    pool = Pool(limits.blocks, limits.block_size)
    stages = [
        make_stage(model, layers, pool, options, stage)
        for stage, layers in enumerate(split(model.layers, count))
    ]
    compiling = {"max_inflight": options.in_flight, "fuse": options.fuse, "passes": options.passes}
    decode_examples = list(decode_variants(limits, options))
    steps = [decode_step(stages, limits.slots, options.via) for _ in range(limits.groups)]
    decode = [step.lower_many(decode_examples).compile(**compiling) for step in steps]
    chunk_examples = list(prefill_variants(limits, options))
    prefill = prefill_step(stages, options.via).lower_many(chunk_examples).compile(**compiling)
    if cg.rank() != 0:
        for graph in (*decode, prefill):
            graph.serve()
        return None
    first = next(iter(stages[0].instances.values()))
    on_device = first.pool0.device.type != "cpu"
    log.info("has compiled the engine")
    engine = CgEngine(limits, options, decode, prefill, on_device)
    if options.warm:
        engine.warm()
    return engine


def make_stage(
    model: Model, layers: range, pool: Pool, options: Options, stage: int
) -> cg.ActorHandle:
    """A stage on its rank, or cut over its ranks."""
    tp, guards = options.tp, Guards(options.clamp, options.debug_bounds)
    if tp == 1:
        return Stage.on(stage)(model, layers, pool, options.dtype, guards=guards)
    mesh = cg.mesh(list(range(stage * tp, (stage + 1) * tp)), tp=tp)
    rows = cg.cut(0, "tp")
    ends = {"part.tokens.weight": rows} if layers.start == 0 else {}
    ends |= {"part.head.weight": rows} if layers.stop == model.layers else {}
    plan = cg.plan({"pool*": cg.cut(2, "tp"), **model.cuts, **ends})
    return Stage.on(mesh, plan=plan)(model, layers, pool, options.dtype, packs=False, guards=guards)


def decode_step(stages: Sequence[cg.ActorHandle], slots: int, via: str = "auto") -> cg.Step:
    """The step of one group of decode batches, with a carry of its own."""
    carried = cg.carry(torch.zeros(slots + 1, dtype=torch.int64), on=0)

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def decode(batch: Tensor, controls: Tensor | None, logprobs: int | None) -> Any:
        given, slot = batch[:, TOKEN], batch[:, SLOT]
        x = torch.where(given < 0, carried.get(slot), given)
        for stage in stages:
            x = cg.via(stage.decode(x, batch, controls, logprobs), via)
        carried.set(x if logprobs is None else x[0], slot)
        return x

    return decode


def prefill_step(stages: Sequence[cg.ActorHandle], via: str = "auto") -> cg.Step:
    """The step of a chunk of one prompt."""

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def prefill(chunk: Tensor, table: Tensor, controls: Tensor, logprobs: int | None) -> Any:
        x = chunk[:, PROMPT : PROMPT + (chunk.shape[1] - PROMPT) // 2]
        for stage in stages:
            x = cg.via(stage.prefill(x, chunk, table, controls, logprobs), via)
        return x

    return prefill


def widths(limits: Limits, options: Options) -> tuple[int, ...]:
    """The lengths of block tables that are compiled."""
    whole = -(-limits.context // limits.block_size)
    chosen = (-(-whole // 4), whole) if options.widths is None else options.widths
    return tuple(sorted({*(width for width in chosen if width < whole), whole}))


def decode_variants(limits: Limits, options: Options):
    """Arguments of each variant of a decode step: padding alone, which is written to the trash.

    One gives log-probabilities, of the largest batch: they are asked for rarely, and each variant
    takes time to compile and to warm.
    """
    for width in widths(limits, options):
        for count in options.batches:
            batch = torch.zeros(count, TABLE + width, dtype=torch.int64)
            batch[:, SLOT] = limits.slots
            yield batch, None, None
            if options.draws:
                yield batch, _controls([Sampling()] * count), None
    if options.draws:
        yield batch, _controls([Sampling()] * count), _ranked(limits)


def prefill_variants(limits: Limits, options: Options):
    """Arguments of each variant of the prefill step."""
    lengths = widths(limits, options)
    for width in lengths:
        for count in options.chunks:
            chunk = torch.zeros(1, PROMPT + 2 * count, dtype=torch.int64)
            chunk[0, LENGTH] = 1
            table = torch.zeros(1, width, dtype=torch.int64)
            yield chunk, table, _controls([Sampling()]), None
            if width == lengths[-1] and options.draws:
                yield chunk, table, _controls([Sampling()]), _ranked(limits)


def _tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _ranked(limits: Limits) -> int:
    """How many of the likeliest tokens a variant with log-probabilities gives."""
    return min(LOGPROBS, limits.vocabulary)


def _scored(limits: Limits, samplings: Iterable[Sampling]) -> int | None:
    """The same where log-probabilities are wanted, else None."""
    wants = any(sampling.logprobs is not None for sampling in samplings)
    return _ranked(limits) if wants else None


def _controls(samplings: Sequence[Sampling]) -> Tensor:
    return torch.tensor([(each.temperature, each.top_p) for each in samplings])


def _bucket(sizes: Sequence[int], needed: int) -> int:
    """The smallest size that is large enough."""
    index = bisect_left(sizes, needed)
    _check(index < len(sizes), f"{needed} of at most {sizes[-1]}")
    return sizes[index]


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"outside of the engine's limits: {what}")
