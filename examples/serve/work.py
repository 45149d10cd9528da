"""Work that the scheduler gives to the engine: decode batches and prefill chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

LOGPROBS = 20
"""Of how many of the likeliest tokens the engine gives log-probabilities, at most."""


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn; temperature 0 is greedy, top_k 0 and top_p 1 are off.

    logprobs: of how many of the likeliest tokens log-probabilities are wanted, beside that of the
    drawn one. None: of none at all, which costs nothing.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    logprobs: int | None = None  # at most LOGPROBS


@dataclass(frozen=True)
class Scores:
    """Log-probabilities, natural ones, of a drawn token and of the likeliest ones, in order.

    They are the model's own: what temperature, top_k and top_p begin with.
    """

    drawn: float
    likeliest: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Row:
    """One request in a decode batch.

    token -1: the engine takes the token that this slot drew last (the carry).
    """

    token: int
    position: int  # of the token in its sequence, from 0
    slot: int  # 0 <= slot < Limits.slots, fixed while a request decodes in its group
    blocks: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True)
class Decode:
    group: int  # 0 <= group < Limits.groups
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Prefill:
    tokens: tuple[int, ...]  # one chunk of one request's prompt
    start: int  # position of its first token
    blocks: tuple[int, ...]  # of the request, enough for start + len(tokens)
    last: bool  # the chunk that draws the first token
    sampling: Sampling


@dataclass(frozen=True)
class Limits:
    groups: int
    slots: int  # the largest decode batch of a group
    chunk: int  # the longest prefill chunk
    blocks: int  # usable blocks are 1 .. blocks - 1; block 0 is trash
    block_size: int
    context: int  # longest sequence
    vocabulary: int
    eos: tuple[int, ...]


class Result(Protocol):
    """Tokens of a batch: one for each row, or the first token of a last chunk (empty otherwise)."""

    def done(self) -> bool: ...
    def result(self, timeout: float | None = None) -> list[int]: ...
    def scores(self) -> list[Scores]:
        """Of each token, once the result is there; empty unless the work asks for some."""

    def when_done(self, call: Callable[[], None]) -> None: ...


class Engine(Protocol):
    limits: Limits

    def submit(self, work: Decode | Prefill) -> Result: ...
    def close(self) -> None: ...
