"""Requests of clients, the limits of the engine, and events for clients: numbers and text."""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass, field
from enum import IntEnum

LOGPROBS = 20
"""The largest number of likeliest tokens whose log-probabilities the engine gives."""
ERROR = "error"
"""The reason of an end that comes with a message."""


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
    prompts: int = 1  # how many a prefill takes


class How(IntEnum):
    """The work of the engine for a token; each value includes the work of those before it."""

    GREEDY = 0  # takes the likeliest
    DRAWN = 1  # draws it
    SCORED = 2  # gives log-probabilities

    @property
    def words(self) -> str:
        """Its name in the log."""
        return ("greedy", "with sampling", "with log-probabilities")[self]


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn; temperature 0 is greedy, top_k 0 and top_p 1 are off.

    Attributes:
        logprobs: the number of the likeliest tokens whose log-probabilities are wanted, beside that
            of the drawn one. None: no log-probabilities at all, which costs nothing.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    logprobs: int | None = None  # at most LOGPROBS

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Columns of a row: the seed, top_k, and the bits of temperature and top_p as float32."""
        (bits,) = struct.unpack("=q", struct.pack("=ff", self.temperature, self.top_p))
        return self.seed, self.top_k, bits

    @property
    def how(self) -> How:
        """The least work that the engine does for a token."""
        if self.logprobs is not None:
            return How.SCORED
        return How.DRAWN if self.temperature else How.GREEDY


@dataclass(frozen=True)
class Scores:
    """Natural log-probabilities of a drawn token and of the likeliest ones, in order.

    They are the model's own, before temperature, top_k and top_p change them.
    """

    drawn: float
    likeliest: tuple[tuple[int, float], ...]


GREEDY = Sampling()


@dataclass(frozen=True)
class Request:
    """A request of a client for `max_tokens` more tokens behind `prompt`."""

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = GREEDY
    ignore_eos: bool = False
    salt: bytes = b""  # requests of different salts share no cached prefix


@dataclass(frozen=True)
class End:
    """The end of a request: `stop` at the end of its text, `length`, or `error` with a message."""

    id: int
    reason: str
    count: int  # of tokens that were drawn for it, a token that ends the text included
    message: str = ""


@dataclass
class Events:
    """The events since the last look, as numbers, which cross processes without conversion."""

    started: array[int] = field(default_factory=lambda: array("I"))  # ids, at their first admission
    pairs: array[int] = field(default_factory=lambda: array("I"))  # id, token, id, token, …
    ends: list[End] = field(default_factory=list)
    scores: list[tuple[int, Scores]] = field(default_factory=list)  # of tokens that want them

    def __bool__(self) -> bool:
        return bool(self.started or self.pairs or self.ends)
