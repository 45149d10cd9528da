"""The engine: stages of a model on all ranks, driven by rank 0 through graphs that cg has compiled.

A decode batch is an execution of a graph of its group, a prefill chunk one of a graph for chunks.
There is a graph for each variant (`variants.py`), and work goes to the cheapest that holds it. The
group's carry takes the tokens of a batch from the last stage to the first; the driver gets them as
well. So the driver may submit the next batch of a group before it knows the tokens of this one.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch

import cg

from .checks import check_draft, check_float8, check_ranks, check_states
from .growing import GrowingEngine, warm_ups_on
from .model import LENGTH, NUMBERS, PROMPT, PROMPT_ADAPTER, START
from .opening import open_model
from .parts import Model
from .progress import said
from .requests import How, Limits
from .results import Parts, Tokens, Verified, copies_of
from .sampling.records import RecordLayout, write
from .settings import Options, Source
from .stage_graphs import StageGraphs
from .variants import (
    AnySize,
    DecodeSize,
    PrefillSize,
    VerifySize,
    all_sizes,
    bucket,
    cheapest,
    first_sizes,
    general,
    later_sizes,
    open_masks,
    prompt_rows,
    widths,
    without_padding,
)
from .work import (
    ADAPTER,
    ENTRY,
    POSITION,
    RECORD,
    SEED,
    SLOT,
    STATE,
    TABLE,
    TOKEN,
    Chunk,
    Decode,
    Masks,
    Prefill,
    Proposals,
    Result,
    Rows,
    words,
)

log = logging.getLogger("serve")

ALONE = How.SCORED | How.PROMPT | How.MASKED
"""Work for which a chunk has to be alone."""
WITHOUT_DRAWS = "a temperature or log-probabilities, without `draws`"


class CgEngine(GrowingEngine[AnySize]):
    """Rank 0's end of the engine; `start` makes it.

    Args:
        device: of the first stage; None for the host.

    Attributes:
        options: how the model is served.
    """

    def __init__(
        self,
        limits: Limits,
        options: Options,
        graphs: StageGraphs,
        device: torch.device | None = None,
    ) -> None:
        later = later_sizes(limits, options) if options.late else []
        warm_ups = warm_ups_on(device) if options.warm else 0
        super().__init__(graphs, later, warm_ups, options.in_flight)
        self.limits, self.options = limits, options
        self._copies = copies_of(device)
        self._widths = widths(limits, options)
        self._counting = np.arange(max(limits.slots, limits.draft_tokens + 1, *self._widths))
        # Those of requests, from the first to below the last; a model without states needs none.
        self._slots = int(bool(limits.lengths)), 1 + limits.requests

    def submit(self, work: Decode | Prefill) -> Result:
        """Start work; waits while `Options.in_flight` executions of its graph are under way.

        If no variant holds it, one is compiled first.

        Raises:
            ValueError: it is outside of the limits; nothing was started.
        """
        self.drop_ended()
        if isinstance(work, Prefill):
            return self._prefill(work)
        self._check_rows(work)
        if work.proposals is not None:
            return self._verify(work, work.proposals)
        return self._decode(work)

    def close(self) -> None:
        super().close()
        if self._copies is not None:
            self._copies.close()

    # -- variants ----------------------------------------------------------------------------------

    def examples(self, size: AnySize) -> list[tuple[Any, ...]]:
        if isinstance(size, DecodeSize):
            return [size.example(self.limits, group) for group in range(self.limits.groups)]
        return [size.example(self.limits)]

    def may_serve(self, size: AnySize, ideal: AnySize) -> bool:
        if self.limits.lengths and isinstance(ideal, PrefillSize):
            return isinstance(size, PrefillSize) and size.tokens == ideal.tokens
        return type(size) is type(ideal)

    def general(self, ideal: AnySize) -> AnySize:
        return general(ideal, self.limits, self.options)

    # -- work --------------------------------------------------------------------------------------

    def _check_rows(self, work: Decode) -> None:
        """Refuse a batch that is outside of the limits, but for its blocks."""
        limits, rows, how = self.limits, work.rows, work.how
        _check(0 <= work.group < limits.groups, f"group {work.group} of {limits.groups}")
        _check(0 < len(rows) <= limits.slots, f"{len(rows)} rows of at most {limits.slots}")
        _check(self.options.draws or how is How.GREEDY, WITHOUT_DRAWS)
        known = -1 if work.proposals is None else 0
        _within("a token", rows[:, TOKEN], known, limits.vocabulary)
        _within("a slot", rows[:, SLOT], 0, limits.slots)
        _within("a record", rows[:, RECORD], 0, limits.requests + 1)
        _within("a position", rows[:, POSITION], 0, limits.context)
        _within("a slot of states", rows[:, STATE], *self._slots)
        _within("an adapter", rows[:, ADAPTER], 0, 1 + limits.adapters)

    def _decode(self, work: Decode) -> Tokens:
        limits, rows, block = self.limits, work.rows, self.limits.block_size
        index, offset = np.divmod(rows[:, POSITION], block)
        table = self._table(rows, index)
        size = self.needed(DecodeSize(*self._decode_size(table, work.how)))
        numbers = size.padding(limits)
        numbers[: len(rows), :TABLE] = rows[:, :TABLE]
        numbers[: len(rows), TABLE : TABLE + table.shape[1]] = table
        numbers[: len(rows), ENTRY] = table[self._counting[: len(rows)], index] * block + offset
        graph = self.graphs.compiled[size][work.group]
        batch, masks = torch.from_numpy(numbers), open_masks(size.rows, size.how, limits)
        if masks is not None and work.masks is not None:
            masks[: len(rows)] = torch.from_numpy(self._checked(work.masks))
        future = graph.execute(batch, masks, int(size.how), work.group)
        return self._tokens(future, len(rows), size.how)

    def _verify(self, work: Decode, proposals: Proposals) -> Verified:
        limits, rows, block = self.limits, work.rows, self.limits.block_size
        count, tokens = len(rows), limits.draft_tokens + 1
        _within("a number of proposals", proposals.counts, 0, tokens)
        _within("a proposal", proposals.tokens, 0, limits.vocabulary)
        _within("a token", proposals.before, 0, limits.vocabulary)
        ends = rows[:, POSITION] + proposals.counts
        _within("a position", ends, 0, limits.context)
        table = self._table(rows, ends // block)
        size = self.needed(VerifySize(*self._decode_size(table, work.how), tokens))
        numbers = size.padding(limits)
        batch = numbers[:count]
        batch[:, START], batch[:, LENGTH] = rows[:, POSITION], 1 + proposals.counts
        batch[:, NUMBERS:PROMPT], batch[:, PROMPT_ADAPTER] = rows[:, SEED:RECORD], rows[:, ADAPTER]
        ids, entries, blocks = np.split(batch[:, PROMPT:], [tokens, 2 * tokens], axis=1)
        if limits.has_draft:
            ids[:, 0], ids[:, 1] = proposals.before, rows[:, TOKEN]
        else:
            ids[:, 0], ids[:, 1:] = rows[:, TOKEN], proposals.tokens
        at = np.minimum(rows[:, POSITION, None] + self._counting[:tokens], ends[:, None])
        index, offset = np.divmod(at, block)
        is_asked = self._counting[:tokens] <= proposals.counts[:, None]
        entries[:] = (np.take_along_axis(table, index, 1) * block + offset) * is_asked
        blocks[:, : table.shape[1]] = table
        (graph,) = self.graphs.compiled[size]
        future = graph.execute(torch.from_numpy(numbers), tokens, int(size.how))
        self.flying.append(future)
        return Verified(future, proposals.counts, size.how, self._copies)

    def _table(self, rows: Rows, last: Rows) -> Rows:
        """The blocks of rows up to the last one of each, by number; 0 behind it."""
        needed = int(last.max()) + 1
        table = rows[:, TABLE : TABLE + needed]
        _check(table.shape[1] == needed, f"{table.shape[1]} blocks, and {needed} are needed")
        is_needed = self._counting[:needed] <= last[:, None]
        _within("a block", np.where(is_needed, table, 1), 1, self.limits.blocks)
        return table * is_needed

    def _checked(self, masks: Masks) -> Masks:
        """Masks that have a word for every 32 tokens."""
        count = words(self.limits.vocabulary)
        _check(masks.shape[-1] == count, f"a mask has {masks.shape[-1]} words of {count}")
        return masks

    def _decode_size(self, table: Rows, how: How) -> tuple[int, int, How]:
        """The rows, the blocks and the work of the smallest variant that holds a batch."""
        batches, (rows, needed) = self.options.batches, table.shape
        if How.SCORED in how:
            return batches[-1], self._widths[-1], how
        return bucket(batches, rows), bucket(self._widths, needed), how

    def _prefill(self, work: Prefill) -> Result:
        limits = self.limits
        lengths = [len(chunk.tokens) for chunk in work.chunks]
        _check(0 < len(lengths) <= limits.prompts, f"{len(lengths)} of {limits.prompts} prompts")
        for chunk, length in zip(work.chunks, lengths, strict=True):
            longest = limits.scored if How.PROMPT in work.how else limits.chunk
            _check(0 < length <= longest, f"{length} tokens of at most {longest}")
            if limits.lengths:
                _check(length in limits.lengths, f"{length} tokens, of {limits.lengths}")
            is_whole = limits.goes_on or not chunk.start or length == 1
            _check(is_whole, f"{length} tokens go on with a prompt, and only one at a time can")
        _check(self.options.draws or work.how is How.GREEDY, WITHOUT_DRAWS)
        is_alone = bool(work.how & ALONE) or any(chunk.start for chunk in work.chunks)
        _check(len(lengths) == 1 or not is_alone, "a chunk that has to be alone")
        ideal = self._prefill_size(work, is_alone)
        size = self.variant(ideal)
        if size is None and ideal.rows > 1:
            parts = [self._prefill(replace(work, chunks=(chunk,))) for chunk in work.chunks]
            one = replace(ideal, rows=1)
            alone = cheapest((size for size in self.usable if self.may_serve(size, one)), one)
            assert alone is not None, "it has served the first of them"
            self.asked[ideal] += (len(parts) - 1) * self.seconds(alone)
            return Parts(parts)
        if size is None:
            size = self.needed(ideal)
        numbers = size.padding(limits)
        # Chunks that draw a token come first, since the result has the tokens of the first rows.
        ordered = sorted(work.chunks, key=lambda chunk: not chunk.last)
        for row, chunk in zip(numbers, ordered, strict=False):
            self._write(row, chunk, size)
        (graph,) = self.graphs.compiled[size]
        batch, masks = torch.from_numpy(numbers), open_masks(size.rows, size.how, limits)
        if masks is not None and (mask := work.chunks[0].mask) is not None:
            masks[0] = torch.from_numpy(self._checked(mask))
        future = graph.execute(batch, masks, size.tokens, size.width, int(size.how))
        return self._tokens(future, work.draws, size.how, lengths[0])

    def _prefill_size(self, work: Prefill, is_alone: bool) -> PrefillSize:
        """The smallest size of a variant that holds chunks."""
        limits, options, how, first = self.limits, self.options, work.how, work.chunks[0]
        tokens = max(len(chunk.tokens) for chunk in work.chunks)
        if not is_alone:
            rows = bucket(prompt_rows(limits), len(work.chunks))
            return PrefillSize(rows, bucket(options.chunks, tokens), 0, how)
        if work.how & ALONE:
            longest = limits.scored if How.PROMPT in how else options.chunks[-1]
            length = tokens if limits.lengths else bucket(options.chunks, longest)
            return PrefillSize(1, length, self._widths[-1], how)
        width = bucket(self._widths, -(-(first.start + tokens) // limits.block_size))
        how |= How.DRAWN if options.draws else How.GREEDY
        return PrefillSize(1, bucket(options.chunks, tokens), width, how)

    def _write(self, row: Rows, chunk: Chunk, variant: PrefillSize) -> None:
        """Write a chunk into a row of a variant."""
        limits, size, count = self.limits, self.limits.block_size, len(chunk.tokens)
        tokens, end = variant.tokens, variant.end
        at = np.arange(chunk.start, chunk.start + count)
        _within("a token", np.asarray(chunk.tokens), 0, limits.vocabulary)
        _within("a position", at, 0, limits.context)
        needed = int(at[-1]) // size + 1
        table = np.array(chunk.blocks[:needed])
        _check(len(table) == needed, f"{len(table)} blocks, and {needed} are needed")
        _within("a block", table, 1, limits.blocks)
        _within("a slot of states", np.array([chunk.state]), *self._slots)
        _within("an adapter", np.array([chunk.adapter]), 0, 1 + limits.adapters)
        row[:PROMPT] = chunk.start, count, chunk.state, chunk.adapter, *chunk.sampling.numbers
        ids, entries, blocks = np.split(row[PROMPT:end], [tokens, 2 * tokens])
        ids[:count], entries[:count] = chunk.tokens, table[at // size] * size + at % size
        if variant.width:
            blocks[:needed] = table
        if chunk.record is not None:
            _within("a record", np.asarray(chunk.record.place), 1, limits.requests + 1)
            write(row[variant.behind :], chunk, RecordLayout(limits.vocabulary))
        if chunk.following is not None:
            following = np.asarray(chunk.following)
            _within("a token", following, 0, limits.vocabulary)
            row[end : end + count] = following

    def _tokens(self, future: cg.Future, count: int, how: How, scored: int = 0) -> Tokens:
        """The result of an execution, as `Tokens` takes it."""
        self.flying.append(future)
        return Tokens(future, count, how, scored, self._copies)


def start(source: Source, options: Options | None = None) -> CgEngine | None:
    """Start the engine; collective.

    Args:
        source: a folder, or a configuration for random weights, as `open_model` takes them; or
            what it has made of one.
        options: the same on all ranks.

    Returns:
        The engine on rank 0, once its variants have run; with `Options.late` the first. None on
        other ranks, which serve until rank 0 has closed it.

    Raises:
        FileNotFoundError, ValueError: as `open_model`; or the options do not fit the model.
    """
    options = Options() if options is None else options
    model = _opened(source, options.seed)
    draft = None if options.draft is None else _opened(options.draft, options.seed)
    check_states(model, draft, options.draft_tokens)
    check_float8(model, draft, options.kv_float8)
    if model.states:
        options = replace(options, chunks=without_padding(options.chunks))
    limits, began = limits_of(model, options), monotonic()
    if draft is not None:
        check_draft(draft, model, limits.context)
    with said("reading the weights", cg.rank() == 0):
        graphs = StageGraphs(model, limits, options, draft)
    limits = graphs.limits
    sizes = first_sizes(limits, options) if options.late else all_sizes(limits, options)
    for number, size in enumerate(sizes, 1):
        with said(f"compiling variant {number} of {len(sizes)}, {size}", cg.rank() == 0):
            graphs.compile(size)
    graphs.open()
    if cg.rank() != 0:
        graphs.follow()
        return None
    engine = CgEngine(limits, options, graphs, graphs.device)
    with said("running them on padding"):
        for size in sizes:
            engine.warm(size)
    engine.rest(monotonic() - began)
    return engine


def _opened(source: Source, seed: int) -> Model:
    if isinstance(source, Model):
        return source
    return open_model(Path(source) if isinstance(source, str) else source, seed)


def limits_of(model: Model, options: Options) -> Limits:
    """The limits of an engine for a model.

    Raises:
        ValueError: the options do not fit the model, or the number of ranks.
    """
    check_ranks(model, cg.world_size(), options.ways)
    _check(options.draft is None or options.draft_tokens > 0, "a draft of 0 tokens")
    stages = cg.world_size() // options.ways.ranks
    context = min(model.context, options.context or model.context)
    groups, slots = options.groups or stages, options.batches[-1]
    chunk = min(options.chunks[-1], context)
    longest = bucket(options.chunks, chunk)
    prompts = (longest if options.prompt_tokens is None else options.prompt_tokens) // longest
    _check(prompts > 0, f"{options.prompt_tokens} prompt tokens, and a chunk alone has {longest}")
    return Limits(
        groups=groups,
        slots=slots,
        chunk=chunk,
        blocks=options.blocks,
        block_size=options.span,
        context=context,
        vocabulary=model.vocabulary,
        eos=model.eos,
        prompts=min(prompts, groups * slots),
        # No more logits at a time than a decode batch has, if a chunk is so short.
        scored=min(chunk, max(n for n in options.chunks if n <= max(slots, options.chunks[0]))),
        draft_tokens=options.draft_tokens,
        has_draft=options.draft is not None,
        adapters=model.adapters,
        lengths=tuple(n for n in options.chunks if n <= chunk) if model.states else (),
    )


def _within(name: str, numbers: Any, least: int, bound: int) -> None:
    """Refuse numbers that are not from `least` to below `bound`."""
    low, high = int(numbers.min()), int(numbers.max())
    if low < least or high >= bound:
        _check(False, f"{name} is {low if low < least else high}, of {bound}")


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(f"outside of the engine's limits: {message}")
