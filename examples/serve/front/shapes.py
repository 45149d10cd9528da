"""OpenAI's answers: chunks of a stream, and whole ones."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from ..features import Features
from ..requests import End, Scores
from .protocol import Completion
from .text import Stops, Text

DONE = b"data: [DONE]\n\n"


class Choice:
    """The text of one choice, as its tokens come.

    Args:
        prompt: the tokens whose text the choice continues; empty for a chat.
    """

    def __init__(self, text: Text, stop: tuple[str, ...], prompt: Sequence[int] = ()) -> None:
        self._text, self._decoder, self._stops = text, text.decoder(prompt), Stops(stop)
        self._length = 0  # characters that are whole, also those that are held back
        self._scored: list[Scored] = []
        self.count = 0  # tokens, one that ends the text included
        self.reason: str | None = None

    def feed(self, tokens: list[int], end: End | None, scores: Sequence[Scores] = ()) -> str:
        """Take tokens, and return text that can be shown; set `reason` at an end or stop string.

        Args:
            scores: of each of the tokens, if they are wanted.
        """
        shown = []
        for place, token in enumerate(tokens):
            self.count += 1
            text = self._decoder.step(token)
            if scores:
                self._score(token, scores[place])
                self._length += len(text)
            shown.append(self._stops.step(text))
            if self._stops.is_hit:
                self.reason = "stop"
                return "".join(shown)
        if end is not None:
            shown.append(self._stops.step(self._decoder.rest()))
            shown.append(self._stops.rest())
            self.count = end.count
            self.reason = "stop" if self._stops.is_hit else end.reason
        return "".join(shown)

    def _score(self, token: int, scores: Scores) -> None:
        piece = self._text.piece
        likeliest = [(piece(id_), value) for id_, value in scores.likeliest]
        self._scored.append(Scored(piece(token), scores.drawn, likeliest, self._length))

    def take_scored(self) -> list[Scored]:
        """The scored tokens since this was called last."""
        scored, self._scored = self._scored, []
        return scored


@dataclass(frozen=True)
class Scored:
    """A drawn token with its log-probability, the likeliest ones, and where its text begins."""

    piece: bytes
    logprob: float
    likeliest: list[tuple[bytes, float]]
    offset: int


def logprobs(scored: Sequence[Scored], is_chat: bool) -> dict[str, Any]:
    """The field `logprobs` of a choice."""
    if is_chat:
        return {
            "content": [
                {
                    **_chat_token(token.piece, token.logprob),
                    "top_logprobs": [_chat_token(*pair) for pair in token.likeliest],
                }
                for token in scored
            ],
            "refusal": None,
        }
    return {
        "tokens": [_name(token.piece) for token in scored],
        "token_logprobs": [token.logprob for token in scored],
        "top_logprobs": [{_name(p): value for p, value in token.likeliest} for token in scored],
        "text_offset": [token.offset for token in scored],
    }


def _chat_token(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _name(piece), "logprob": logprob, "bytes": list(piece)}


def _name(piece: bytes) -> str:
    """A token's text; for a part of a character its bytes, as OpenAI writes them."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class Shape:
    """The fields that all pieces of one answer share."""

    def __init__(self, what: Completion, features: Features) -> None:
        self._what, self._features = what, features
        self._has_scores = what.sampling.logprobs is not None
        kind = "chatcmpl" if what.is_chat else "cmpl"
        self.id, self._created = f"{kind}-{secrets.token_hex(12)}", int(time.time())
        self._name = "chat.completion.chunk" if what.is_chat else "text_completion"
        head = f'"object":"{self._name}","created":{self._created},"model":{quoted(what.model)}'
        self._before = f'data: {{"id":"{self.id}",{head},"choices":[{{"index":'
        self._behind = '}],"usage":null}\n\n' if what.include_usage else "}]}\n\n"

    def chunk(self, index: int, text: str, choice: Choice, is_first: bool) -> bytes:
        """An event with text of a choice; the first has its role, and the last its end."""
        reason = choice.reason
        if not self._features.fast_sse or self._has_scores:
            self._features.changes["fast_sse"] += not self._features.fast_sse
            return self._slow_chunk(index, text, choice, is_first)
        if self._what.is_chat:
            role = '"role":"assistant",' if is_first else ""
            body = f'"delta":{{{role}"content":{quoted(text)}}}'
        else:
            body = f'"text":{quoted(text)}'
        ended = "null" if reason is None else f'"{reason}"'
        event = (
            f'{self._before}{index},{body},"logprobs":null,"finish_reason":{ended}{self._behind}'
        )
        return event.encode()

    def _slow_chunk(self, index: int, text: str, choice: Choice, is_first: bool) -> bytes:
        body: dict[str, Any] = {"text": text}
        if self._what.is_chat:
            role = {"role": "assistant"} if is_first else {}
            body = {"delta": {**role, "content": text}}
        whole = self._whole(self._name, [{"index": index, **body, **self._end(choice)}])
        if self._what.include_usage:
            whole["usage"] = None
        return b"data: " + json.dumps(whole).encode() + b"\n\n"

    def usage_chunk(self, prompt: int, drawn: int) -> bytes:
        """The last event, if it is asked for: no choice, and the counts."""
        whole = {**self._whole(self._name, []), "usage": _usage(prompt, drawn)}
        return b"data: " + json.dumps(whole).encode() + b"\n\n"

    def answer(self, texts: list[str], choices: list[Choice], prompt: int) -> dict[str, Any]:
        """The whole answer of a request without a stream."""
        listed: list[dict[str, Any]] = []
        for index, (text, choice) in enumerate(zip(texts, choices, strict=True)):
            body: dict[str, Any] = {"text": text}
            if self._what.is_chat:
                body = {"message": {"role": "assistant", "content": text, "refusal": None}}
            listed.append({"index": index, **body, **self._end(choice)})
        name = "chat.completion" if self._what.is_chat else "text_completion"
        drawn = sum(choice.count for choice in choices)
        return {**self._whole(name, listed), "usage": _usage(prompt, drawn)}

    def _end(self, choice: Choice) -> dict[str, Any]:
        scores = logprobs(choice.take_scored(), self._what.is_chat) if self._has_scores else None
        return {"logprobs": scores, "finish_reason": choice.reason}

    def _whole(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": name,
            "created": self._created,
            "model": self._what.model,
            "choices": choices,
        }


def _usage(prompt: int, drawn: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}
