"""The engine: stages of a model on all ranks, driven by rank 0 through graphs that cg has compiled.

A decode batch is an execution of the graph of its group, a prefill chunk one of the prefill graph.
Each graph has a variant for each bucket, and all variants have run before the engine is ready. The
group's carry takes the tokens of a batch from the last stage to the first; the driver gets them as
well. So the driver may submit the next batch of a group before it knows the tokens of this one.
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

import cg

from .families import GptConfig, Model, open_model
from .model import LENGTH, PROMPT, Guards, Pool, Stage, split
from .requests import How, Limits
from .results import Tokens
from .work import ENTRY, POSITION, SLOT, TABLE, TOKEN, Chunk, Decode, Prefill, Rows

log = logging.getLogger("serve")

PROMPTS = (1, 4, 16, 64, 256, 1024)
"""Numbers of prompts that a prefill is compiled for, below the largest."""
WARM_UPS = 3
"""Executions of each variant in each context; the third one is recorded, on devices that can."""
WITHOUT_DRAWS = "a temperature or log-probabilities, without `draws`"
STARTS = {"cpu": 16 << 20, "accelerator": 192 << 20}
"""Bytes that a device reads in the time that a layer takes besides reading its weights.

With 8 rows a layer of SmolLM2-135M takes 3.2 ms of a core, and its head of 113 MB takes 10 ms. A
layer of Qwen2.5-0.5B takes 66 us of an H100, in a recorded step, and its 30 MB take 9 us of these.
"""
SAYING = 10.0
"""Seconds between two lines of the log on how far warming is."""


@dataclass(frozen=True)
class Options:
    """How a model is served; equal on all ranks.

    Attributes:
        groups: decode batches at a time; one for each rank if None.
        batches: the sizes of decode batches that are compiled, ascending.
        chunks: the lengths of prefill chunks that are compiled, ascending.
        prompt_tokens: the most tokens of all prompts of one prefill, with padding; one prompt if
            None.
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
        via: the transport of activations and tokens from stage to stage, as `cg.via` takes it.
        draws: whether decode batches with a temperature are taken; without, half as many variants
            are compiled.
        tp: ranks that hold a stage together, each a part of its heads, of its hidden units and of
            the vocabulary.
        layers: how many each stage has; if None, `cut` balances them.
    """

    groups: int | None = None
    batches: tuple[int, ...] = (1, 2, 4, 8)
    chunks: tuple[int, ...] = (32, 128)
    prompt_tokens: int | None = None
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
    layers: tuple[int, ...] | None = None


class CgEngine:
    """Rank 0's end of the engine; `start` makes it."""

    def __init__(
        self,
        limits: Limits,
        options: Options,
        decode: Sequence[cg.Compiled],
        prefill: cg.Compiled,
        copies: torch.Stream | None = None,
    ) -> None:
        self.limits = limits
        self._copies = copies
        self.decode = tuple(decode)
        self.prefill = prefill
        self.options = options
        self._widths = widths(limits, options)
        self._counting = np.arange(max(limits.slots, *self._widths))

    def submit(self, work: Decode | Prefill) -> Tokens:
        """Start work; waits while `Options.in_flight` executions of its graph are under way.

        Raises:
            ValueError: it is outside of the limits; nothing was started.
        """
        return self._decode(work) if isinstance(work, Decode) else self._prefill(work)

    def close(self) -> None:
        """End the executions in flight, then the ranks; idempotent."""
        for graph in (*self.decode, self.prefill):
            graph.close()

    def warm(self) -> None:
        """Run each variant in each of its contexts, on padding."""
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
        limits, rows, how, size = self.limits, work.rows, work.how, self.limits.block_size
        _check(0 <= work.group < limits.groups, f"group {work.group} of {limits.groups}")
        _check(0 < len(rows) <= limits.slots, f"{len(rows)} rows of at most {limits.slots}")
        _check(self.options.draws or how is How.GREEDY, WITHOUT_DRAWS)
        _within("a token", rows[:, TOKEN], -1, limits.vocabulary)
        _within("a slot", rows[:, SLOT], 0, limits.slots)
        _within("a position", rows[:, POSITION], 0, limits.context)
        index, offset = np.divmod(rows[:, POSITION], size)
        needed = int(index.max()) + 1
        table = rows[:, TABLE : TABLE + needed]
        _check(table.shape[1] == needed, f"{table.shape[1]} blocks, and {needed} are needed")
        is_needed = self._counting[:needed] <= index[:, None]
        _within("a block", np.where(is_needed, table, 1), 1, limits.blocks)
        batches = self.options.batches[-1 if how is How.SCORED else 0 :]
        width = _bucket(self._lengths(how), needed)
        numbers = _padding(_bucket(batches, len(rows)), TABLE + width, SLOT, limits.slots)
        numbers[: len(rows), :TABLE] = rows[:, :TABLE]
        np.multiply(table, is_needed, numbers[: len(rows), TABLE : TABLE + needed])
        numbers[: len(rows), ENTRY] = table[self._counting[: len(rows)], index] * size + offset
        future = self.decode[work.group].execute(torch.from_numpy(numbers), int(how))
        return Tokens(future, len(rows), self._copies)

    def _prefill(self, work: Prefill) -> Tokens:
        limits, how, chunks, width = self.limits, work.how, self.options.chunks, 0
        lengths = [len(chunk.tokens) for chunk in work.chunks]
        _check(0 < len(lengths) <= limits.prompts, f"{len(lengths)} of {limits.prompts} prompts")
        for length in lengths:
            _check(0 < length <= limits.chunk, f"{length} tokens of at most {limits.chunk}")
        _check(self.options.draws or how is How.GREEDY, WITHOUT_DRAWS)
        if how is How.SCORED or any(chunk.start for chunk in work.chunks):
            _check(len(lengths) == 1, "a chunk that has to be alone")
            how = max(how, How.DRAWN) if self.options.draws else how
            chunks = chunks[-1 if how is How.SCORED else 0 :]
            needed = -(-(work.chunks[0].start + lengths[0]) // limits.block_size)
            width = _bucket(self._lengths(how), needed)
        length = _bucket(chunks, max(lengths))
        rows = _bucket(prompt_rows(limits), len(lengths))
        numbers = _padding(rows, PROMPT + 2 * length + width, LENGTH, 1)
        # Chunks that draw a token come first, since the result has the tokens of the first rows.
        ordered = sorted(work.chunks, key=lambda chunk: not chunk.last)
        for row, chunk in zip(numbers, ordered, strict=False):
            self._write(row, chunk, length, width)
        future = self.prefill.execute(torch.from_numpy(numbers), length, int(how))
        return Tokens(future, work.draws, self._copies)

    def _write(self, row: Rows, chunk: Chunk, length: int, width: int) -> None:
        """Write a chunk into a row with room for `length` tokens and `width` blocks."""
        limits, size, count = self.limits, self.limits.block_size, len(chunk.tokens)
        at = np.arange(chunk.start, chunk.start + count)
        _within("a token", np.asarray(chunk.tokens), 0, limits.vocabulary)
        _within("a position", at, 0, limits.context)
        needed = int(at[-1]) // size + 1
        table = np.array(chunk.blocks[:needed])
        _check(len(table) == needed, f"{len(table)} blocks, and {needed} are needed")
        _within("a block", table, 1, limits.blocks)
        row[:PROMPT] = chunk.start, count, *chunk.sampling.numbers
        ids, entries, blocks = np.split(row[PROMPT:], [length, 2 * length])
        ids[:count], entries[:count] = chunk.tokens, table[at // size] * size + at % size
        if width:
            blocks[:needed] = table

    def _lengths(self, how: How) -> tuple[int, ...]:
        """The lengths of block tables for which variants are compiled, ascending."""
        return self._widths[-1:] if how is How.SCORED else self._widths


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
    groups, slots = options.groups or count, options.batches[-1]
    chunk = min(options.chunks[-1], context)
    longest = _bucket(options.chunks, chunk)
    prompts = (longest if options.prompt_tokens is None else options.prompt_tokens) // longest
    _check(prompts > 0, f"{options.prompt_tokens} prompt tokens, and a chunk alone has {longest}")
    limits = Limits(
        groups=groups,
        slots=slots,
        chunk=chunk,
        blocks=options.blocks,
        block_size=options.block_size,
        context=context,
        vocabulary=model.vocabulary,
        eos=model.eos,
        prompts=min(prompts, groups * slots),
    )
    # Rank 0 decides: another rank may have an accelerator where this one has none.
    parts = cg.allgather(cut(model, count, options))[0]
    pool = Pool(limits.blocks, limits.block_size)
    stages = [make_stage(model, layers, pool, options, stage) for stage, layers in enumerate(parts)]
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
    device = first.pool0.device
    copies = torch.Stream(device) if _has_events(device) else None
    log.info("has compiled the engine")
    engine = CgEngine(limits, options, decode, prefill, copies)
    if options.warm:
        engine.warm()
    return engine


def cut(model: Model, stages: int, options: Options) -> list[range]:
    """The layers of each stage: `Options.layers`, or a cut that balances decode steps.

    A step reads all weights, so a layer takes the time to read its own and that to start its
    operators. The last stage reads the head as well, which may be as large as many layers.
    """
    _check(model.layers >= stages, f"{model.layers} layers in {stages} stages")
    size = options.dtype.itemsize
    layer = model.layer * size
    layer += STARTS["accelerator" if torch.accelerator.is_available() else "cpu"]
    head = model.hidden * model.vocabulary * size / layer
    sizes = options.layers or split(model.layers, stages, head)
    fits = len(sizes) == stages and sum(sizes) == model.layers and min(sizes) > 0
    _check(fits, f"{model.layers} layers in {stages} stages as {sizes}")
    return [range(a, b) for a, b in itertools.pairwise(itertools.accumulate(sizes, initial=0))]


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
    plan = cg.plan({"pool*": cg.cut(1, "tp"), **model.cuts, **ends})
    return Stage.on(mesh, plan=plan)(model, layers, pool, options.dtype, packs=False, guards=guards)


def decode_step(stages: Sequence[cg.ActorHandle], slots: int, via: str = "auto") -> cg.Step:
    """The step of one group of decode batches, with a carry of its own."""
    carried = cg.carry(torch.zeros(slots + 1, dtype=torch.int64), on=0)

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def decode(batch: Tensor, how: int) -> Any:
        tokens, slot = batch[:, TOKEN], batch[:, SLOT]
        x = torch.where(tokens < 0, carried.get(slot), tokens)
        for stage in stages:
            x = cg.via(stage.decode(x, batch, how), via)
        carried.set(x[0] if how == How.SCORED else x, slot)
        return x

    return decode


def prefill_step(stages: Sequence[cg.ActorHandle], via: str = "auto") -> cg.Step:
    """The step of chunks of prompts."""

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def prefill(batch: Tensor, tokens: int, how: int) -> Any:
        x = batch[:, PROMPT : PROMPT + tokens]
        for stage in stages:
            x = cg.via(stage.prefill(x, batch, tokens, how), via)
        return x

    return prefill


def widths(limits: Limits, options: Options) -> tuple[int, ...]:
    """The lengths of block tables that are compiled."""
    whole = -(-limits.context // limits.block_size)
    chosen = (-(-whole // 4), whole) if options.widths is None else options.widths
    return tuple(sorted({*(width for width in chosen if width < whole), whole}))


def decode_variants(limits: Limits, options: Options) -> Iterator[tuple[Tensor, int]]:
    """Arguments of each variant of a decode step: padding alone, which is written to the trash.

    Only one variant, of the largest batch, gives log-probabilities. Clients rarely ask for them,
    and each variant takes time to compile and to warm.
    """
    for width in widths(limits, options):
        for count in options.batches:
            batch = torch.from_numpy(_padding(count, TABLE + width, SLOT, limits.slots))
            for how in (How.GREEDY, How.DRAWN)[: 1 + options.draws]:
                yield batch, int(how)
    if options.draws:
        yield batch, int(How.SCORED)


def prompt_rows(limits: Limits) -> tuple[int, ...]:
    """The numbers of prompts that a prefill is compiled for."""
    return (*(rows for rows in PROMPTS if rows < limits.prompts), limits.prompts)


def prefill_variants(limits: Limits, options: Options) -> Iterator[tuple[Tensor, int, int]]:
    """Arguments of each variant of the prefill step: prompts that begin, and one that goes on.

    Tables are empty where prompts begin. Variants that go on with a prompt draw, with any sampling.
    One variant, the longest, gives log-probabilities.
    """
    hows, lengths = (How.GREEDY, How.DRAWN)[: 1 + options.draws], widths(limits, options)
    for count in options.chunks:
        for rows in prompt_rows(limits):
            for how in hows:
                yield _prompts(rows, count, 0, how)
        for width in lengths:
            yield _prompts(1, count, width, hows[-1])
    if options.draws:
        yield _prompts(1, count, lengths[-1], How.SCORED)


def _prompts(rows: int, count: int, width: int, how: How) -> tuple[Tensor, int, int]:
    batch = _padding(rows, PROMPT + 2 * count + width, LENGTH, 1)
    return torch.from_numpy(batch), count, int(how)


def _padding(rows: int, columns: int, column: int, number: int) -> Rows:
    """Rows of padding, which go to the trash, with a number in one column."""
    numbers = np.zeros((rows, columns), np.int64)
    numbers[:, column] = number
    return numbers


def _bucket(sizes: Sequence[int], needed: int) -> int:
    """The smallest size that is large enough."""
    index = bisect_left(sizes, needed)
    _check(index < len(sizes), f"{needed} of at most {sizes[-1]}")
    return sizes[index]


def _within(name: str, numbers: Any, least: int, bound: int) -> None:
    """Refuse numbers that are not from `least` to below `bound`."""
    low, high = int(numbers.min()), int(numbers.max())
    if low < least or high >= bound:
        _check(False, f"{name} is {low if low < least else high}, of {bound}")


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(f"outside of the engine's limits: {message}")


def _has_events(device: torch.device) -> bool:
    """True if the host can wait for events of the device, as for those of GPUs."""
    if device.type == "cpu":
        return False
    try:
        torch.Stream(device).record_event().synchronize()
    except RuntimeError:
        return False
    return True
