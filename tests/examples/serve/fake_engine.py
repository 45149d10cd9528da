"""An engine of plain Python: it keeps tokens where a model keeps keys and values.

A token is a hash of all tokens before it, and these are read back through the table of blocks. So a
block that is shared while it is written, given away too early, or read before it is written makes
other tokens than `reference`, as it would in a model. Where chunks have fixed lengths, as for
layers that keep states, the slot of a request has to hold its own tokens, and no padding.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from examples.serve.requests import LOGPROBS, Adjustments, How, Limits, Sampling, Scores
from examples.serve.work import WORD, Chunk, Decode, Masks, Prefill, Proposals

from ..serve_work import Row, rows_of

TINY = Limits(
    groups=2, slots=4, chunk=5, blocks=16, block_size=3, context=30, vocabulary=50, eos=(7,)
)
ROOMY = Limits(
    groups=2,
    slots=8,
    chunk=32,
    blocks=257,
    block_size=16,
    context=512,
    vocabulary=256,
    eos=(),
    scored=8,
)
Drawn = tuple[list[int], list[Scores], list[int]]
"""Tokens, their scores, and how many each row has; of rows without proposals nothing."""
GARBAGE = -9
"""What work that fails leaves where it should have written."""


def draw(
    tokens: Sequence[int], sampling: Sampling, vocabulary: int, mask: Masks | None = None
) -> int:
    """The token behind these; its seed counts unless it is greedy.

    Under a mask it is the next one that is allowed, in a circle.
    """
    seed = sampling.seed if sampling.temperature else 0
    name = repr(([int(token) for token in tokens], int(seed), sampling.adjustments)).encode()
    drawn = int.from_bytes(blake2b(name, digest_size=8).digest(), "little") % vocabulary
    if mask is None:
        return drawn
    ring = ((drawn + step) % vocabulary for step in range(vocabulary))
    return next(token for token in ring if mask[token // WORD] >> token % WORD & 1)


def guess(tokens: Sequence[int], most: int, sampling: Sampling, vocabulary: int) -> list[int]:
    """Proposals behind these tokens: each is right or not by chance, and the same each time."""
    known = [int(token) for token in tokens]
    chance, guesses = random.Random(repr((known, sampling.seed))), list[int]()
    for _ in range(most):
        right = draw([*known, *guesses], sampling, vocabulary)
        guesses.append(right if chance.random() < 0.7 else chance.randrange(vocabulary))
    return guesses


def scores_of(tokens: Sequence[int], token: int, vocabulary: int) -> Scores:
    """Made-up log-probabilities behind these tokens, of which the drawn one is the likeliest."""
    first = -(draw(tokens, Sampling(1.0, seed=1), vocabulary) + 1) / 64
    count = min(LOGPROBS, vocabulary)
    likeliest = (((token + rank) % vocabulary, first - rank) for rank in range(count))
    return Scores(first, tuple(likeliest))


def reference(
    prompt: Sequence[int], number: int, limits: Limits, sampling: Sampling | None = None
) -> list[int]:
    """The tokens that a request alone draws, up to and without one that ends the text."""
    tokens = list(prompt)
    for _ in range(number):
        token = draw(tokens, sampling or Sampling(), limits.vocabulary)
        if token in limits.eos:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


@dataclass(eq=False)
class FakeResult:
    """Of one piece of work; callbacks are called when it has run."""

    work: Decode | Prefill
    tokens: list[int] | None = None
    error: Exception | None = None
    scored: list[Scores] = field(default_factory=list)
    asked: list[Scores] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)  # of tokens, for each row that had proposals
    calls: list[Callable[[], None]] = field(default_factory=list)

    def done(self) -> bool:
        return self.tokens is not None or self.error is not None

    def result(self, timeout: float | None = None) -> list[int]:
        if self.error is not None:
            raise self.error
        assert self.tokens is not None, "asked before it was done"
        return self.tokens

    def scores(self) -> list[Scores]:
        return self.scored

    def prompt_scores(self) -> list[Scores]:
        return self.asked

    def counts(self) -> list[int]:
        return self.numbers

    def when_done(self, call: Callable[[], None]) -> None:
        if self.done():
            call()
        else:
            self.calls.append(call)


class FakeEngine:
    """Runs work in the order of submission, by `run_one`, or by itself in a loop of asyncio.

    Args:
        delay: seconds of a piece of work; None: only `run_one` runs any.
        fails: for each piece of work the error that it fails with, or None.
    """

    def __init__(
        self,
        limits: Limits = TINY,
        delay: float | None = None,
        fails: Callable[[Decode | Prefill], Exception | None] = lambda work: None,
    ) -> None:
        self.limits, self.delay, self.fails = limits, delay, fails
        self.queue: deque[FakeResult] = deque()
        self.carried: dict[tuple[int, int], int] = {}
        self.records: dict[int, tuple[Adjustments, list[int]]] = {}
        self.pool: list[list[int | None]] = [
            [None] * limits.block_size for _ in range(limits.blocks)
        ]
        self.states: list[list[int]] = [[] for _ in range(1 + limits.groups * limits.slots)]
        self.is_closed = self._garbles = False
        self.works = 0
        self.to_improve = self.urgent = 0
        self.longest_slice = 0.0
        self.before: Callable[[], None] = lambda: None
        self.is_ready = True
        self.ready: Callable[[], None] = lambda: None

    def due(self, idle: bool) -> bool:
        return self.is_ready and (self.urgent > 0 or (idle and self.to_improve > 0))

    def when_ready(self, call: Callable[[], None]) -> None:
        self.ready = call

    def improve(self) -> bool:
        assert not self.queue, "improved with work in flight"
        assert self.to_improve > 0, "nothing to improve"
        self.before()
        self.to_improve -= 1
        self.urgent = max(0, self.urgent - 1)
        return not self.to_improve

    def submit(self, work: Decode | Prefill) -> FakeResult:
        assert not self.is_closed, "submitted after close"
        self._check(work)
        result = FakeResult(work)
        self.queue.append(result)
        if self.delay is not None and len(self.queue) == 1:
            asyncio.get_running_loop().call_later(self.delay, self._tick)
        return result

    def _tick(self) -> None:
        self.run_one()
        if self.queue:
            asyncio.get_running_loop().call_later(self.delay or 0.0, self._tick)

    def close(self) -> None:
        self.is_closed = True

    def run_one(self) -> None:
        """Run the oldest piece of work."""
        result = self.queue.popleft()
        self.works += 1
        try:
            error = self.fails(result.work)
            self._garbles = error is not None
            result.tokens, result.scored, result.numbers = self._run(result.work)
            result.asked = self._score_prompt(result.work)
            if error is not None:
                raise error
        except Exception as raised:
            result.error = raised
        for call in result.calls:
            call()

    def _run(self, work: Decode | Prefill) -> Drawn:
        if isinstance(work, Prefill):
            for chunk in work.chunks:
                for place, token in enumerate(chunk.tokens, chunk.start):
                    self._write(chunk.blocks, place, int(token), chunk.state)
            last = [chunk for chunk in work.chunks if chunk.last]
            ends = [
                (each.blocks, each.start + len(each.tokens), each.sampling, each.state)
                for each in last
            ]
            masks = [each.mask for each in last]
            drawn = [self._draw(*end, mask) for end, mask in zip(ends, masks, strict=True)]
            for chunk, token in zip(last, drawn, strict=True):
                self._load(chunk, token)
        elif work.proposals is not None:
            return self._verify(work, work.proposals)
        else:
            rows = rows_of(work)
            ends = [(row.blocks, row.position + 1, row.sampling, row.state) for row in rows]
            masks = [None] * len(rows) if work.masks is None else list(work.masks)
            drawn = [
                self._decode(work.group, row, mask) for row, mask in zip(rows, masks, strict=True)
            ]
        if How.SCORED not in work.how:
            return drawn, [], []
        scored = [
            scores_of(self._read(blocks, length), token, self.limits.vocabulary)
            for (blocks, length, *_), token in zip(ends, drawn, strict=True)
        ]
        return drawn, scored, []

    def _verify(self, work: Decode, proposals: Proposals) -> Drawn:
        """All proposals are written, and the tokens behind each are drawn, as a model does it."""
        drawn: list[int] = []
        scored: list[Scores] = []
        numbers = []
        for row, proposed, count, before in zip(
            rows_of(work),
            proposals.tokens.tolist(),
            proposals.counts.tolist(),
            proposals.before.tolist(),
            strict=True,
        ):
            self._write(row.blocks, row.position, row.token, row.state)
            known = self._read(row.blocks, row.position + 1)
            assert known[-2] == before
            tokens = proposed
            if self.limits.has_draft:
                assert not any(tokens)
                tokens = guess(known, len(tokens), row.sampling, self.limits.vocabulary)
            for step, token in enumerate(tokens[:count], 1):
                self._write(row.blocks, row.position + step, token, row.state)
            own = [
                self._draw(row.blocks, row.position + step + 1, row.sampling, row.state)
                for step in range(count + 1)
            ]
            right = next((step for step in range(count) if own[step] != tokens[step]), count) + 1
            if How.SCORED in work.how:
                scored += [
                    scores_of(known + tokens[:step], own[step], self.limits.vocabulary)
                    for step in range(right)
                ]
            drawn += own[:right]
            numbers.append(right)
        return drawn, scored, numbers

    def _score_prompt(self, work: Decode | Prefill) -> list[Scores]:
        """The scores of the token behind each of a chunk, if it asks for them."""
        if isinstance(work, Decode) or How.PROMPT not in work.how:
            return []
        (chunk,) = work.chunks
        assert chunk.following is not None
        pairs = enumerate(chunk.following, chunk.start + 1)
        return [
            scores_of(self._read(chunk.blocks, place), int(token), self.limits.vocabulary)
            for place, token in pairs
        ]

    def _decode(self, group: int, row: Row, mask: Masks | None) -> int:
        token = self.carried[group, row.slot] if row.token == -1 else row.token
        self._write(row.blocks, row.position, token, row.state)
        sampling = row.sampling
        if row.record:
            adjustments, known = self.records[row.record]
            assert known == self._read(row.blocks, row.position + 1), "another request's record"
            sampling = replace(sampling, adjustments=adjustments)
        drawn = self._draw(row.blocks, row.position + 1, sampling, row.state, mask)
        if row.record:
            self.records[row.record][1].append(drawn)
        self.carried[group, row.slot] = drawn
        return drawn

    def _load(self, chunk: Chunk, token: int) -> None:
        """Begin the record of a request whose logits are adjusted."""
        adjustments = chunk.sampling.adjustments
        assert (chunk.record is None) == (adjustments is None)
        if chunk.record is None or adjustments is None:
            return
        assert 0 < chunk.record.place <= self.limits.requests
        known = self._read(chunk.blocks, chunk.start + len(chunk.tokens))
        assert known == list(chunk.record.tokens)
        assert 0 < chunk.record.prompt <= len(known)
        self.records[chunk.record.place] = adjustments, [*known, token]

    def _write(self, blocks: Sequence[int], place: int, token: int, state: int) -> None:
        size = self.limits.block_size
        self.states[state] = [*(self.states[state] if place else []), token]
        self.pool[blocks[place // size]][place % size] = GARBAGE if self._garbles else token

    def _draw(
        self,
        blocks: Sequence[int],
        length: int,
        sampling: Sampling,
        state: int,
        mask: Masks | None = None,
    ) -> int:
        tokens = self._read(blocks, length)
        if self.limits.lengths and not self._garbles:
            assert self.states[state] == tokens, "the state is another sequence's"
        return draw(tokens, sampling, self.limits.vocabulary, mask)

    def _read(self, blocks: Sequence[int], length: int) -> list[int]:
        size = self.limits.block_size
        read = [self.pool[blocks[place // size]][place % size] for place in range(length)]
        assert None not in read, "read before it was written"
        return read  # type: ignore[return-value]

    def _check(self, work: Decode | Prefill) -> None:
        """Every bound of the border."""
        limits = self.limits
        if isinstance(work, Prefill):
            chunks = work.chunks
            assert 0 < len(chunks) <= limits.prompts
            longest = limits.scored if How.PROMPT in work.how else limits.chunk
            assert all(0 < len(chunk.tokens) <= longest for chunk in chunks)
            is_alone = bool(work.how & (How.SCORED | How.PROMPT | How.MASKED))
            is_alone = is_alone or any(chunk.start for chunk in chunks)
            assert len(chunks) == 1 or not is_alone
            if limits.lengths:
                (length,) = {len(chunk.tokens) for chunk in chunks}
                assert length in limits.lengths
                assert limits.goes_on or length == 1 or not chunks[0].start
            ends = [(chunk.start + len(chunk.tokens), chunk.blocks) for chunk in chunks]
            tokens = [int(token) for chunk in chunks for token in chunk.tokens]
        else:
            assert 0 <= work.group < limits.groups
            slots = [row.slot for row in rows_of(work)]
            records = [row.record for row in rows_of(work) if row.record]
            assert len(set(records)) == len(records)
            assert bool(records) == (How.ADJUSTED in work.how)
            assert len(set(slots)) == len(slots) <= limits.slots
            assert slots
            assert all(0 <= slot < limits.slots for slot in slots)
            counts = [0] * len(slots)
            if work.proposals is not None:
                counts = work.proposals.counts.tolist()
                assert all(0 <= count <= limits.draft_tokens for count in counts)
                assert work.proposals.tokens.shape == (len(slots), limits.draft_tokens)
                assert any(counts) or limits.has_draft
                assert all(row.token >= 0 for row in rows_of(work))
            ends = [
                (row.position + 1 + count, row.blocks)
                for row, count in zip(rows_of(work), counts, strict=True)
            ]
            tokens = [row.token for row in rows_of(work) if row.token != -1]
        assert all(0 <= token < limits.vocabulary for token in tokens)
        for end, blocks in ends:
            assert end <= limits.context
            assert len(blocks) * limits.block_size >= end
            assert all(0 < block < limits.blocks for block in blocks)
