"""Work that the scheduler gives to the engine: decode batches and prefill chunks."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .requests import How, Limits, Sampling, Scores

Rows = NDArray[np.int64]
# Columns of a decode batch, int64 [rows, TABLE + blocks of a row]. The token is -1 where the engine
# takes the one that its slot drew last (the carry). A slot is fixed while a request decodes in its
# group. The entry, which the engine writes, is where in the pools the token's keys and values go,
# counted through all blocks. Then come `Sampling.numbers`, and the record of a request whose logits
# are adjusted, which is a row of `sampling.records.Records`; others have 0, which is nobody's. Last
# are the slot of the request in the pools of states, and its adapter.
TOKEN, POSITION, SLOT, ENTRY, SEED, TOP_K, CONTROLS, RECORD, STATE, ADAPTER = range(10)
TABLE = 10

Masks = NDArray[np.int32]
"""Tokens that rows may draw, int32 [rows, words]: a bit a token, the lowest of a word first."""
WORD = 32
"""Tokens of a word of a mask."""


def words(vocabulary: int) -> int:
    """The words of a row of a mask."""
    return -(-vocabulary // WORD)


@dataclass(frozen=True, eq=False)
class Proposals:
    """Tokens that may follow those of a batch, to be verified with them.

    Attributes:
        tokens: int64 [rows, Limits.draft_tokens], of which those behind a row's are padding. They
            are zeros if the engine has a draft, which proposes them.
        counts: int64 [rows], the number of proposals of each row.
        before: int64 [rows], the token ahead of each row's.
    """

    tokens: Rows
    counts: Rows
    before: Rows


@dataclass(frozen=True, eq=False)
class Decode:
    """One more token for each of some requests of a group, or several.

    Attributes:
        group: 0 <= group < Limits.groups.
        rows: int64 [rows, TABLE + blocks of a row], with the columns above.
        how: all that any of its rows needs.
        proposals: to be verified; a row has then one token more than are right. Tokens of the rows
            are known.
        masks: of the tokens that each row may draw; None if all may draw any.
    """

    group: int
    rows: Rows
    how: How = How.GREEDY
    proposals: Proposals | None = None
    masks: Masks | None = None


@dataclass(frozen=True, eq=False)
class Record:
    """The content of a request's record, with the chunk that draws its first token of a stay.

    Attributes:
        place: of the record; 1 <= place <= Limits.requests.
        tokens: of the sequence, all that are known.
        prompt: how many of these are the prompt; the others have been drawn.
    """

    place: int
    tokens: Sequence[int] | NDArray[Any]
    prompt: int


@dataclass(frozen=True, eq=False)
class Chunk:
    """A chunk of one request's prompt."""

    tokens: Sequence[int] | NDArray[Any]
    start: int  # position of its first token
    blocks: Sequence[int]  # of the request, enough for start + len(tokens)
    last: bool  # the chunk that draws the first token
    sampling: Sampling
    record: Record | None = None  # with the last chunk, if logits are adjusted
    # The token behind each, whose log-probabilities are wanted; any number behind the prompt.
    following: Sequence[int] | NDArray[Any] | None = None
    state: int = 0  # the slot of the request in the pools of states
    adapter: int = 0  # of the request
    mask: Masks | None = None  # int32 [words], with the last chunk, if the request has a grammar

    @property
    def how(self) -> How:
        """The least work that the engine does: a chunk before the last draws nothing.

        A chunk that gives log-probabilities of a prompt is as the last one, for fewer variants.
        """
        masked = How.GREEDY if self.mask is None else How.DRAWN | How.MASKED
        if self.following is not None:
            return self.sampling.how | How.DRAWN | How.PROMPT | masked
        return self.sampling.how | masked if self.last else How.GREEDY


@dataclass(frozen=True, eq=False)
class Prefill:
    """Chunks of several requests: one, or up to `Limits.prompts` that all begin a prompt.

    Log-probabilities and masks are for a chunk alone.
    """

    chunks: tuple[Chunk, ...]

    @property
    def how(self) -> How:
        """All that any of its chunks needs."""
        return How(functools.reduce(operator.or_, (chunk.how for chunk in self.chunks), 0))

    @property
    def draws(self) -> int:
        """The number of tokens that it draws."""
        return sum(chunk.last for chunk in self.chunks)


class Result(Protocol):
    """Tokens of a batch: of each row, or the first tokens of last chunks."""

    def done(self) -> bool: ...
    def result(self, timeout: float | None = None) -> list[int]: ...
    def counts(self) -> list[int]:
        """How many tokens each row has, once the result is there; empty where each has one."""

    def scores(self) -> list[Scores]:
        """The scores of each token, once the result is there; empty unless work asks for some."""

    def prompt_scores(self) -> list[Scores]:
        """The scores of the token behind each of a chunk, if the work asks for them."""

    def when_done(self, call: Callable[[], None]) -> None: ...


class Engine(Protocol):
    """Serves work.

    Attributes:
        longest_slice: the most seconds that `improve` has taken.
    """

    limits: Limits
    longest_slice: float

    def submit(self, work: Decode | Prefill) -> Result: ...
    def due(self, idle: bool) -> bool:
        """True if `improve` is to be called as soon as nothing is in flight."""

    def improve(self) -> bool:
        """Prepare a little for work that is to come; nothing may be in flight.

        True if what was prepared is complete, and stays.
        """

    def when_ready(self, call: Callable[[], None]) -> None:
        """Have any thread call when `due` may have become true without any work."""

    def close(self) -> None: ...
