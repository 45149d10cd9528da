"""A choice of an answer: its text, as its tokens come, and where the text of each token begins."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..requests import End, Scores
from .stops import Stops
from .text import Text
from .tools.deltas import CallBegin, Content, Delta, OutputParser


@dataclass(frozen=True)
class Reading:
    """How the tokens of a choice are read.

    Attributes:
        stop: strings that end the text.
        ends: tokens that do, beside those of the model.
        keeps_stop: whether the text has the string or token that ends it.
        shows_special: whether the text has special tokens.
        min_tokens: tokens in whose text no stop string is looked for.
        ids: whether the ids of tokens are kept.
        is_scored: whether log-probabilities of its tokens are wanted.
        is_silent: whether its one token is dropped, since none was wanted.
        parser: makes what reads calls and thoughts in the text; None: there are none.
        kept: special tokens that it has to see.
    """

    stop: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()
    keeps_stop: bool = False
    shows_special: bool = False
    min_tokens: int = 0
    ids: bool = False
    is_scored: bool = False
    is_silent: bool = False
    parser: Callable[[], OutputParser] | None = None
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scored:
    """A token with its log-probability, the likeliest ones, and where its text begins.

    The first token of a text has no log-probability.
    """

    piece: bytes
    logprob: float | None
    likeliest: list[tuple[bytes, float]]
    offset: int


class Choice:
    """The text of one choice, as its tokens come.

    Args:
        prompt: the tokens whose text the choice continues; empty if it begins one.
        echo: the text of the prompt, if the choice begins with it.
        asked: of all tokens of the prompt but the first, once the choice has its first token, if
            they are wanted.

    Attributes:
        count: of tokens, one that ends the text included.
        reason: of the end, once there is one.
        stop_reason: the string of `Reading.stop`, or token of `Reading.ends`, that has ended the
            text; None at any other end.
    """

    def __init__(
        self,
        text: Text,
        reading: Reading | None = None,
        prompt: Sequence[int] = (),
        echo: str | None = None,
        asked: Sequence[Scores] = (),
    ) -> None:
        self.asked = asked
        self._prompt, self._echo = prompt, echo
        self._text, self._reading = text, reading or Reading()
        special, kept = self._reading.shows_special, self._reading.kept
        self._decoder = text.decoder(prompt, special, kept)
        self._parser = self._reading.parser and self._reading.parser()
        self._has_calls = False
        self._stops = Stops(self._reading.stop, self._reading.keeps_stop)
        self._offsets = Offsets()
        self._scored: list[Scored] = []
        self._ids: list[int] = []
        self.count = 0
        self.reason: str | None = None
        self.stop_reason: str | int | None = None

    def feed(self, tokens: list[int], end: End | None, scores: Sequence[Scores] = ()) -> str:
        """Take tokens, and return text that can be shown; set `reason` at an end or stop string.

        Args:
            scores: of each of the tokens, if they are wanted.
        """
        shown = self._begin()
        if self._reading.is_silent:
            self.reason = None if end is None else "length"
            return "".join(shown)
        for place, token in enumerate(tokens):
            shown.append(self._step(token, scores[place] if scores else None))
            if self._stops.is_hit:
                self.reason, self.stop_reason = "stop", self._stops.hit
                return "".join(shown)
        if end is not None:
            if end.token is not None:
                self._keep_last(end.token, shown)
            shown.append(self._stops.step(self._decoder.rest()))
            shown.append(self._stops.rest())
            self.count = end.count
            self.reason = "stop" if self._stops.is_hit else end.reason
            self.stop_reason = self._stops.hit or None
            if end.token in self._reading.ends:
                self.stop_reason = end.token
        return "".join(shown)

    def deltas(self, text: str) -> list[Delta]:
        """The deltas of text that `feed` has given; once there is a reason, all that are left."""
        if self._parser is None:
            return [Content(text)] if text else []
        deltas = self._parser.feed(text, self.reason is not None)
        self._has_calls |= any(isinstance(delta, CallBegin) for delta in deltas)
        return deltas

    @property
    def finish(self) -> str | None:
        """The reason as clients are told, after the last delta."""
        return "tool_calls" if self._has_calls and self.reason == "stop" else self.reason

    def _begin(self) -> list[str]:
        """The text of the prompt with the first tokens, if the choice begins with it."""
        if self._echo is None:
            return []
        text, self._echo = self._echo, None
        if self._reading.is_scored:
            decoder = self._text.decoder((), self._reading.shows_special)
            for token, scores in zip(self._prompt, [None, *self.asked], strict=True):
                self._score(token, scores, decoder.step(token))
            self._offsets = Offsets(len(text))
        return [text]

    def _score(self, token: int, scores: Scores | None, text: str) -> None:
        """Keep the scores of a token, with which some text came out."""
        piece = self._text.piece(token)
        offset = self._offsets.step(piece, text)
        if scores is None:
            self._scored.append(Scored(piece, None, [], offset))
            return
        likeliest = [(self._text.piece(id_), value) for id_, value in scores.likeliest]
        self._scored.append(Scored(piece, scores.drawn, likeliest, offset))

    def _step(self, token: int, scores: Scores | None) -> str:
        self.count += 1
        if self._reading.ids:
            self._ids.append(token)
        text = self._decoder.step(token)
        if scores is not None:
            self._score(token, scores, text)
        return text if self.count <= self._reading.min_tokens else self._stops.step(text)

    def _keep_last(self, token: int, shown: list[str]) -> None:
        """Show the token that has ended the text, if that is wanted."""
        if self._reading.ids:
            self._ids.append(token)
        if self._reading.keeps_stop:
            shown.append(self._stops.step(self._decoder.step(token)))

    def take_scored(self) -> list[Scored]:
        """The scored tokens since this was called last."""
        scored, self._scored = self._scored, []
        return scored

    def take_ids(self) -> list[int]:
        """The ids of tokens since this was called last; with `Reading.ids`."""
        ids, self._ids = self._ids, []
        return ids


class Offsets:
    """Where the text of each token begins, in characters.

    A token may hold a part of a character, or bytes that are none, which become U+FFFD.

    Args:
        start: the length of the text ahead.
    """

    def __init__(self, start: int = 0) -> None:
        self._length = start  # of the text that is out
        self._held = b""  # of tokens whose text is not out

    def step(self, piece: bytes, text: str) -> int:
        """Take the bytes of a token and the text that came out with it; where it begins."""
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        before = len(utf8.decode(self._held))
        begun, _ = utf8.getstate()
        if begun and not _goes_on(begun, piece):
            before += 1  # what was begun becomes one U+FFFD
        offset = self._length + before
        if text:
            self._length += len(text)
            utf8.decode(piece)
            self._held, _ = utf8.getstate()
        elif self._held or not _is_whole(piece):  # else a token that is not shown
            self._held += piece
        return offset


def _goes_on(begun: bytes, piece: bytes) -> bool:
    """True if a token's first byte goes on with a character that is begun."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(begun + piece[:1])
    except UnicodeDecodeError:
        return False
    return True


def _is_whole(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True
