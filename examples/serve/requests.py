"""Requests of clients, the limits of the engine, and events for clients: numbers and text."""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass, field
from enum import IntFlag

LOGPROBS = 20
"""The largest number of likeliest tokens whose log-probabilities the engine gives."""
BIASES = 1024
"""The most tokens of a request that have a bias."""
BAD_WORDS = 128
"""The most sequences of several tokens that a request may forbid."""
BAD_WORD = 16
"""The most tokens of such a sequence."""
ERROR = "error"
"""The reason of an end that comes with a message."""
UNFOLLOWED = "unfollowed"
"""The same, for a grammar that takes too much to follow any further."""


@dataclass(frozen=True)
class Limits:
    groups: int
    slots: int  # the largest decode batch of a group
    chunk: int  # the longest prefill chunk
    blocks: int  # usable blocks are 1 .. blocks - 1; block 0 is trash
    block_size: int  # tokens, on all ranks that share a sequence
    context: int  # longest sequence
    vocabulary: int
    eos: tuple[int, ...]
    prompts: int = 1  # how many a prefill takes
    scored: int = 1  # the longest chunk that gives log-probabilities of a prompt
    draft_tokens: int = 0  # that are proposed for a row and verified with it; 0: none ever
    has_draft: bool = False  # whether a model on the engine's side proposes them
    lengths: tuple[int, ...] = ()  # of chunks, ascending, where layers keep states; else any
    goes_on: bool = True  # whether chunks of several tokens go on with a prompt
    adapters: int = 0  # that requests may ask for
    width: int = 0  # numbers of the vectors of a model that pools; 0: it draws tokens

    @property
    def requests(self) -> int:
        """The most requests that hold blocks at a time."""
        return self.groups * self.slots


class How(IntFlag):
    """The work of the engine for a token; `GREEDY`, without any other, takes the likeliest."""

    GREEDY = 0
    DRAWN = 1  # draws it
    SCORED = 2  # gives log-probabilities
    ADJUSTED = 4  # changes logits before
    PROMPT = 8  # gives log-probabilities of the prompt's tokens
    MASKED = 16  # draws one that a mask allows

    @property
    def words(self) -> str:
        """Its name in the log."""
        names = {
            How.SCORED: "log-probabilities",
            How.ADJUSTED: "penalties",
            How.PROMPT: "log-probabilities of the prompt",
            How.MASKED: "masks",
        }
        if rare := [name for how, name in names.items() if how in self]:
            return f"with {' and '.join(rare)}"
        return "with sampling" if How.DRAWN in self else "greedy"


@dataclass(frozen=True)
class Adjustments:
    """Changes of logits ahead of the draw, as vLLM defines them; the defaults change nothing.

    They come in the order of the attributes, except for `min_p`, which counts after temperature.

    Attributes:
        banned: tokens that are never drawn.
        allowed: the only tokens that are drawn; None: all.
        bad_words: sequences of at most `BAD_WORD` tokens, of which the answer gets no last token
            behind all others.
        held: tokens that are not drawn among the first `min_tokens` of the answer.
        biases: tokens, and what is added to their logits.
        repetition: by which positive logits of tokens in the prompt or the answer are divided, and
            others multiplied.
        frequency: what each occurrence of a token in the answer takes from its logit.
        presence: what one or more occurrences take.
        min_p: a token is drawn only if it is so many times as likely as the likeliest, or more.
    """

    banned: tuple[int, ...] = ()
    allowed: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    held: tuple[int, ...] = ()
    min_tokens: int = 0
    biases: tuple[tuple[int, float], ...] = ()
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    min_p: float = 0.0


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn; temperature 0 is greedy, top_k 0 and top_p 1 are off.

    Attributes:
        logprobs: the number of the likeliest tokens whose log-probabilities are wanted, beside that
            of the drawn one. None: no log-probabilities at all, which costs nothing.
        adjustments: of logits; None: none, which costs nothing.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    logprobs: int | None = None  # at most LOGPROBS
    adjustments: Adjustments | None = None

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Columns of a row: the seed, top_k, and the bits of temperature and top_p as float32."""
        (bits,) = struct.unpack("=q", struct.pack("=ff", self.temperature, self.top_p))
        return self.seed, self.top_k, bits

    @property
    def speculates(self) -> bool:
        """True if tokens may be proposed; the counts of a record are of tokens that are right."""
        return self.adjustments is None

    @property
    def how(self) -> How:
        """The least work that the engine does for a token."""
        how = How.DRAWN if self.temperature else How.GREEDY
        if self.logprobs is not None:
            how |= How.DRAWN | How.SCORED
        if self.adjustments is not None:
            how |= How.DRAWN | How.ADJUSTED
        return how


@dataclass(frozen=True)
class Scores:
    """Natural log-probabilities of a token and of the likeliest ones, in order.

    They are the model's own, before anything but a mask changes the logits. Under a mask they are
    those among the tokens that it allows.

    Attributes:
        rank: of a token of a prompt: 1 if none is likelier; 0 for a drawn one.
    """

    drawn: float
    likeliest: tuple[tuple[int, float], ...]
    rank: int = 0


GREEDY = Sampling()


@dataclass(frozen=True)
class Request:
    """A request of a client for `max_tokens` more tokens behind `prompt`."""

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = GREEDY
    ignore_eos: bool = False
    stops: tuple[int, ...] = ()  # tokens that end the text, beside those of the model
    prompt_logprobs: int | None = None  # as `Sampling.logprobs`, of all tokens but the first
    salt: bytes = b""  # requests of different salts share no cached prefix
    grammar: str = ""  # that the text has to follow, as llguidance takes it; empty: none
    adapter: int = 0  # counted from 1; 0: none
    second: int = 0  # where the second text of a pair begins, for a model that pools; 0: none

    @property
    def shares(self) -> bytes:
        """Bytes that are equal where requests share cached prefixes."""
        return self.adapter.to_bytes(2, "big") + self.salt


@dataclass(frozen=True)
class End:
    """The end of a request: `stop` at the end of its text, `length`, or `error` with a message."""

    id: int
    reason: str
    count: int  # of tokens that were drawn for it, a token that ends the text included
    message: str = ""
    token: int | None = None  # that has ended the text


@dataclass
class Events:
    """The events since the last look, as numbers, which cross processes without conversion."""

    started: array[int] = field(default_factory=lambda: array("I"))  # ids, at their first admission
    pairs: array[int] = field(default_factory=lambda: array("I"))  # id, token, id, token, …
    ends: list[End] = field(default_factory=list)
    scores: list[tuple[int, Scores]] = field(default_factory=list)  # of tokens that want them
    prompts: list[tuple[int, Scores]] = field(default_factory=list)  # the same of prompts, in order

    def __bool__(self) -> bool:
        return bool(self.started or self.pairs or self.ends or self.prompts)
