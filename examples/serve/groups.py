"""Requests on their way, and groups of them that decode together.

A group is a few arrays with a row for each slot. A decode step changes them in place and copies the
rows that take part, so it does not touch the Python object of each request.
"""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .ngram import Propose
from .requests import How, Limits, Request
from .work import (
    ADAPTER,
    CONTROLS,
    POSITION,
    RECORD,
    SEED,
    SLOT,
    STATE,
    TABLE,
    TOKEN,
    Decode,
    Masks,
    Proposals,
    words,
)


class Guide(Protocol):
    """Follows a text by a grammar, token by token.

    Attributes:
        mask: of the tokens that may be drawn next, int32 [words], while it `is_ready`.
        is_ready: false while a token is taken.
        is_complete: whether the text cannot go on.
        error: why the grammar cannot be followed any further; empty: it can.
    """

    mask: Masks
    is_ready: bool
    is_complete: bool
    error: str


Numbers = NDArray[np.int64]
Tokens = NDArray[np.uint32]
Counts = abc.Sequence[int]


@dataclass(eq=False)
class Sequence:
    """A request on its way.

    Attributes:
        tokens: the prompt and the drawn tokens that are known; while it decodes, its group has
            them.
        written: positions whose keys and values have been submitted; while it decodes, its group
            counts them.
        published: blocks that are in the prefix cache, or could be.
        digest: of the last of these blocks.
        guide: says which tokens may be drawn, if it has a grammar.
        is_started: whether it has been admitted before.
        seat: the group and the slot, while it decodes.
        place: a number of its own from 1, while it holds blocks, else 0. It is that of its slot of
            states, and of its record.
        scored: the last position of the prompt whose log-probabilities were told.
        stay: a number while it holds blocks, else 0. It tells results of an earlier stay apart,
            which are dropped: the same tokens are drawn again.
        propose: proposes what may follow its tokens; None until it is first asked.
    """

    request: Request
    tokens: Tokens
    blocks: list[int] = field(default_factory=list)
    written: int = 0
    published: int = 0
    digest: bytes = b""
    guide: Guide | None = None
    is_started: bool = False
    seat: tuple[Group, int] | None = None
    stay: int = 0
    place: int = 0
    scored: int = 0
    propose: Propose | None = None

    @property
    def record(self) -> int:
        """Its record, while it holds blocks, if its logits are adjusted; else 0."""
        return 0 if self.request.sampling.adjustments is None else self.place

    @property
    def wants_scores(self) -> bool:
        """True if log-probabilities of its prompt are wanted, and not known yet."""
        request = self.request
        return request.prompt_logprobs is not None and self.scored + 1 < len(request.prompt)


class Group:
    """The requests of one decode group, by slots.

    Attributes:
        rows: as `Decode` has them; the engine writes the entries.
        tokens: the known tokens of each sequence; `known` has their numbers.
        ends: the position of each sequence's last token; 0 in a free slot.
        room: positions in the blocks of each row.
        ids: of requests.
        stays: of the sequences; 0 in a free slot.
        members: the sequences.
        hows: what the sequence of each slot needs, of `How`; 0 in a free slot.
        speculates: booleans, whether tokens are proposed for a sequence. Steps of these are apart
            from those of others: until one has ended, nobody knows where its rows go on.
        waits: whether such a step is in flight.
        is_guided: whether the sequence of each slot has a guide; then it does not speculate.
        is_ready: whether the next token may be drawn: what a guide allows is known.
    """

    def __init__(self, number: int, limits: Limits) -> None:
        slots, width = limits.slots, -(-limits.context // limits.block_size)
        self.number, self._size = number, limits.block_size
        self.rows = np.zeros((slots, TABLE + width), np.int64)
        self.rows[:, SLOT] = np.arange(slots)
        self.tokens = np.zeros((slots, limits.context), np.uint32)
        self.known, self.ends, self.room, self.ids, self.stays = np.zeros((5, slots), np.int64)
        self.members = np.full(slots, None, object)
        self.hows = np.zeros(slots, np.int64)
        self.speculates = np.zeros(slots, bool)
        self.waits = False
        self._proposes = limits.draft_tokens > 0
        self.is_guided = np.zeros(slots, bool)
        self.is_ready = np.ones(slots, bool)
        self._words = words(limits.vocabulary)

    @property
    def count(self) -> int:
        """The number of sequences."""
        return int(np.count_nonzero(self.stays))

    def sit(self, sequence: Sequence) -> None:
        """Give a sequence a free slot; its last token is the next to be written."""
        slot = int(np.flatnonzero(self.stays == 0)[0])
        request, known, row = sequence.request, len(sequence.tokens), self.rows[slot]
        row[TOKEN], row[POSITION] = sequence.tokens[-1], sequence.written
        row[SEED : CONTROLS + 1] = request.sampling.numbers
        row[RECORD], row[STATE] = sequence.record, sequence.place
        row[ADAPTER] = request.adapter
        row[TABLE:] = 0
        self.tokens[slot, :known], self.known[slot] = sequence.tokens, known
        self.ends[slot] = len(request.prompt) + request.max_tokens - 1
        self.ids[slot], self.stays[slot], self.members[slot] = request.id, sequence.stay, sequence
        guide = sequence.guide
        may_speculate = request.sampling.speculates and guide is None
        self.speculates[slot] = self._proposes and may_speculate
        self.hows[slot] = request.sampling.how
        self.is_guided[slot] = guide is not None
        self.is_ready[slot] = guide is None or guide.is_ready
        sequence.seat = self, slot
        self.extend(slot, sequence.blocks)

    def leave(self, slot: int) -> None:
        """Free a slot, and give its sequence the known tokens."""
        sequence = self.members[slot]
        sequence.tokens = self.tokens[slot, : self.known[slot]].copy()
        sequence.seat, self.members[slot] = None, None
        self.stays[slot] = self.ends[slot] = 0
        self.hows[slot] = How.GREEDY
        self.speculates[slot] = False

    def short(self) -> list[Sequence]:
        """The sequences whose next token has no block, the oldest first."""
        at = self.rows[:, POSITION]
        short = self.members[(at >= self.room) & (at < self.ends)]
        return sorted(short, key=lambda sequence: sequence.stay) if len(short) else []

    def extend(self, slot: int, blocks: list[int]) -> None:
        """Write all blocks of a row."""
        self.rows[slot, TABLE : TABLE + len(blocks)] = blocks
        self.room[slot] = len(blocks) * self._size

    def wanting(self, speculating: bool) -> Numbers:
        """The slots of sequences that want more tokens: of those that speculate, or of others."""
        wants = (self.rows[:, POSITION] < self.ends) & (self.speculates == speculating)
        return wants.nonzero()[0]

    def decode(self) -> tuple[Decode, Numbers] | None:
        """The next step of the sequences that do not speculate, with their stays; None without any.

        A sequence with a guide takes part once its last token is known, and so its next mask.
        Afterwards their rows are those of the following step, which takes tokens from the carry.
        """
        slots = self.wanting(speculating=False)
        slots = slots[self.is_ready[slots]]
        if not len(slots):
            return None
        step = self._step(slots, None)
        self.rows[slots, POSITION] += 1
        self.rows[slots, TOKEN] = -1
        return step, self.stays[slots]

    def speculate(self, slots: Numbers, proposals: Proposals | None) -> tuple[Decode, Numbers]:
        """The next step of sequences that speculate, with their stays; `go_on` is to follow."""
        self.waits = True
        return self._step(slots, proposals), self.stays[slots]

    def _step(self, slots: Numbers, proposals: Proposals | None) -> Decode:
        ends = self.rows[slots, POSITION] + (0 if proposals is None else proposals.counts)
        rows = self.rows[slots, : TABLE + 1 + int(ends.max()) // self._size]
        how, masks = How(int(np.bitwise_or.reduce(self.hows[slots]))), self._masks(slots)
        if masks is not None:
            how |= How.DRAWN | How.MASKED
        return Decode(self.number, rows, how, proposals, masks)

    def _masks(self, slots: Numbers) -> Masks | None:
        """The masks of rows, which are used up; None if no row has a guide."""
        guided = self.is_guided[slots]
        if not guided.any():
            return None
        masks = np.full((len(slots), self._words), -1, np.int32)
        for row in guided.nonzero()[0]:
            masks[row] = self.members[slots[row]].guide.mask
        self.is_ready[slots] = ~guided
        return masks

    def go_on(self, slots: Numbers, places: Numbers, tokens: Tokens) -> None:
        """After a step of sequences that speculate: the last token of each, and its place."""
        self.rows[slots, POSITION], self.rows[slots, TOKEN] = places, tokens


def runs(rows: int, counts: Counts) -> tuple[Numbers, Numbers]:
    """The row of each token of a step, and its number in the row; one each without counts."""
    row = np.arange(rows)
    if not counts:
        return row, np.zeros_like(row)
    ends = np.cumsum(counts)
    row = np.repeat(row, counts)
    return row, np.arange(len(row)) - (ends - counts)[row]
