"""OpenAI's answers: chunks of a stream, and whole ones."""

from __future__ import annotations

import json
import secrets
import time
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from ..features import Counters, Features
from ..scheduler import End
from .protocol import Completion
from .text import Stops, Text

DONE = b"data: [DONE]\n\n"


class Choice:
    """The text of one choice, as its tokens come."""

    def __init__(self, text: Text, stop: tuple[str, ...]) -> None:
        self._decoder, self._stops = text.decoder(), Stops(stop)
        self.count = 0  # tokens, one that ends the text included
        self.reason: str | None = None

    def feed(self, tokens: list[int], end: End | None) -> str:
        """What can be shown of these tokens; sets `reason` at the end, or at a stop string."""
        shown = []
        for token in tokens:
            self.count += 1
            shown.append(self._stops.step(self._decoder.step(token)))
            if self._stops.is_hit:
                self.reason = "stop"
                return "".join(shown)
        if end is not None:
            shown.append(self._stops.step(self._decoder.rest()))
            shown.append(self._stops.rest())
            self.count = end.count
            self.reason = "stop" if self._stops.is_hit else end.reason
        return "".join(shown)


class Shape:
    """The fields that all pieces of one answer share."""

    def __init__(self, what: Completion, features: Features, counters: Counters) -> None:
        self._what, self._is_fast, self._counters = what, features.fast_sse, counters
        kind = "chatcmpl" if what.is_chat else "cmpl"
        self.id, self._created = f"{kind}-{secrets.token_hex(12)}", int(time.time())
        self._name = "chat.completion.chunk" if what.is_chat else "text_completion"
        head = f'"object":"{self._name}","created":{self._created},"model":{quoted(what.model)}'
        self._before = f'data: {{"id":"{self.id}",{head},"choices":[{{"index":'
        self._behind = '}],"usage":null}\n\n' if what.include_usage else "}]}\n\n"

    def chunk(self, index: int, text: str, reason: str | None, is_first: bool) -> bytes:
        """An event with text of a choice; the first has its role, and the last its end."""
        if not self._is_fast:
            self._counters["fast_sse"] += 1
            return self._slow_chunk(index, text, reason, is_first)
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

    def _slow_chunk(self, index: int, text: str, reason: str | None, is_first: bool) -> bytes:
        choice: dict[str, Any] = {"index": index}
        if self._what.is_chat:
            role = {"role": "assistant"} if is_first else {}
            choice["delta"] = {**role, "content": text}
        else:
            choice["text"] = text
        whole = self._whole(self._name, [{**choice, "logprobs": None, "finish_reason": reason}])
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
            end = {"logprobs": None, "finish_reason": choice.reason}
            listed.append({"index": index, **body, **end})
        name = "chat.completion" if self._what.is_chat else "text_completion"
        drawn = sum(choice.count for choice in choices)
        return {**self._whole(name, listed), "usage": _usage(prompt, drawn)}

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
