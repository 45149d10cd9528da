"""OpenAI's answers: chunks of a stream, and whole ones."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from ..features import Features
from ..requests import Scores
from .choices import Choice, Scored
from .protocol import Completion
from .text import Text
from .tools.deltas import Arguments, CallBegin, Content, Delta, Reasoning


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
        "top_logprobs": [
            None if token.logprob is None else {_name(p): value for p, value in token.likeliest}
            for token in scored
        ],
        "text_offset": [token.offset for token in scored],
    }


def _chat_token(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _name(piece), "logprob": logprob, "bytes": list(piece)}


def prompt_logprobs(
    prompt: Sequence[int], asked: Sequence[Scores], text: Text
) -> list[dict[str, Any] | None]:
    """vLLM's field of this name: for each token of a prompt the likeliest ones and itself."""

    def entry(token: int, value: float, rank: int) -> dict[str, Any]:
        return {"logprob": value, "rank": rank, "decoded_token": _name(text.piece(token))}

    listed: list[dict[str, Any] | None] = [None]
    for token, scores in zip(prompt[1:], asked, strict=True):
        ranked = enumerate(scores.likeliest, 1)
        tokens = {str(id_): entry(id_, value, rank) for rank, (id_, value) in ranked}
        listed.append({**tokens, str(token): entry(token, scores.drawn, scores.rank)})
    return listed


def _name(piece: bytes) -> str:
    """A token's text; for a part of a character its bytes, as OpenAI writes them."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class Shape:
    """The fields that all pieces of one answer share."""

    done = b"data: [DONE]\n\n"

    def __init__(self, completion: Completion, features: Features, text: Text) -> None:
        self._completion, self._features, self._text = completion, features, text
        self._has_scores = completion.sampling.logprobs is not None
        # What most streams do not ask for is not formatted by hand.
        self._is_plain = not (
            self._has_scores or completion.shows_ids or completion.continuous_usage
        )
        kind = "chatcmpl" if completion.is_chat else "cmpl"
        self.id, self._created = (
            f"{kind}-{completion.id or secrets.token_hex(12)}",
            int(time.time()),
        )
        self._name = "chat.completion.chunk" if completion.is_chat else "text_completion"
        head = (
            f'"object":"{self._name}","created":{self._created},"model":{quoted(completion.model)}'
        )
        self._before = f'data: {{"id":{quoted(self.id)},{head},"choices":[{{"index":'
        self._behind = '}],"usage":null}\n\n' if completion.include_usage else "}]}\n\n"

    def chunk(self, index: int, text: str, choice: Choice, is_first: bool) -> bytes:
        """An event with text of a choice; the first has its role, and the last its end."""
        reason = choice.reason
        if not self._features.fast_sse or not self._is_plain:
            self._features.changes["fast_sse"] += not self._features.fast_sse
            return self._slow_chunk(index, text, choice, is_first)
        if self._completion.is_chat:
            role = '"role":"assistant",' if is_first else ""
            body = f'"delta":{{{role}"content":{quoted(text)}}}'
        else:
            body = f'"text":{quoted(text)}'
        ended = "null" if reason is None else f'"{reason}"'
        if choice.stop_reason is not None:
            ended += f',"stop_reason":{json.dumps(choice.stop_reason)}'
        event = (
            f'{self._before}{index},{body},"logprobs":null,"finish_reason":{ended}{self._behind}'
        )
        return event.encode()

    def chunks(self, index: int, deltas: list[Delta], choice: Choice, is_first: bool) -> bytes:
        """An event for each delta of a chat; the last of a choice has its end."""
        ends = choice.reason is not None
        bodies = [delta_body(delta) for delta in deltas]
        if not bodies and (ends or self._completion.shows_ids):
            bodies = [{}]
        events = []
        for place, body in enumerate(bodies):
            role = {"role": "assistant"} if is_first and not place else {}
            is_last = place == len(bodies) - 1
            end = self._end(choice) if is_last else {"logprobs": None, "finish_reason": None}
            listed = {"index": index, "delta": {**role, **body}, **end}
            events.append(self._event(index, listed, choice, is_first and not place))
        return b"".join(events)

    def _slow_chunk(self, index: int, text: str, choice: Choice, is_first: bool) -> bytes:
        body: dict[str, Any] = {"text": text}
        if self._completion.is_chat:
            role = {"role": "assistant"} if is_first else {}
            body = {"delta": {**role, "content": text}}
        listed = {"index": index, **body, **self._end(choice)}
        return self._event(index, listed, choice, is_first)

    def _event(self, index: int, listed: dict[str, Any], choice: Choice, is_first: bool) -> bytes:
        prompt, whole = self._prompt(index), self._whole(self._name, [listed])
        if self._completion.shows_ids and is_first:
            (whole if self._completion.is_chat else listed)["prompt_token_ids"] = prompt
        if self._completion.include_usage:
            counts = _usage(len(prompt), choice.count)
            whole["usage"] = counts if self._completion.continuous_usage else None
        return b"data: " + json.dumps(whole).encode() + b"\n\n"

    def opening(self) -> bytes:
        """The events ahead of the first token: none."""
        return b""

    def closing(self, prompt: int, choices: Sequence[Choice]) -> bytes:
        """The last event, if it is asked for: no choice, and the counts."""
        if not self._completion.include_usage:
            return b""
        drawn = sum(choice.count for choice in choices)
        whole = {**self._whole(self._name, []), "usage": _usage(prompt, drawn)}
        return b"data: " + json.dumps(whole).encode() + b"\n\n"

    def answer(self, texts: list[str], choices: list[Choice], prompt: int) -> dict[str, Any]:
        """The whole answer of a request without a stream."""
        listed: list[dict[str, Any]] = []
        for index, (text, choice) in enumerate(zip(texts, choices, strict=True)):
            body: dict[str, Any] = {"text": text}
            if self._completion.is_chat:
                body = {"message": message(choice.deltas(text))}
            listed.append({"index": index, **body, **self._end(choice)})
            if not self._completion.is_chat:
                listed[-1].update(self._of_prompt(index, choice))
        name = "chat.completion" if self._completion.is_chat else "text_completion"
        drawn = sum(choice.count for choice in choices)
        whole = {**self._whole(name, listed), "usage": _usage(prompt, drawn)}
        if self._completion.is_chat:
            whole.update(self._of_prompt(0, choices[0]))
        return whole

    def _of_prompt(self, index: int, choice: Choice) -> dict[str, Any]:
        """Fields about the prompt of a choice, which a chat has but once."""
        prompt, fields = self._prompt(index), dict[str, Any]()
        if self._completion.shows_ids:
            fields["prompt_token_ids"] = prompt
        if (limit := self._completion.prompt_logprobs) is not None:
            asked = [replace(scores, likeliest=scores.likeliest[:limit]) for scores in choice.asked]
            fields["prompt_logprobs"] = prompt_logprobs(prompt, asked, self._text)
        return fields

    def _prompt(self, index: int) -> list[int]:
        """The tokens of the prompt of a choice."""
        return list(self._completion.prompts[index // self._completion.n])

    def _end(self, choice: Choice) -> dict[str, Any]:
        scores = (
            logprobs(choice.take_scored(), self._completion.is_chat) if self._has_scores else None
        )
        end: dict[str, Any] = {"logprobs": scores, "finish_reason": choice.finish}
        if choice.stop_reason is not None:
            end["stop_reason"] = choice.stop_reason
        if self._completion.shows_ids:
            end["token_ids"] = choice.take_ids()
        return end

    def _whole(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": name,
            "created": self._created,
            "model": self._completion.model,
            "choices": choices,
        }


def delta_body(delta: Delta) -> dict[str, Any]:
    """A delta as a stream writes it."""
    if isinstance(delta, Content):
        return {"content": delta.text}
    if isinstance(delta, Reasoning):
        return {"reasoning_content": delta.text}
    if isinstance(delta, Arguments):
        return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
    function = {"name": delta.name, "arguments": ""}
    call = {"index": delta.index, "id": delta.id, "type": "function", "function": function}
    return {"tool_calls": [call]}


def message(deltas: Sequence[Delta]) -> dict[str, Any]:
    """The message of all deltas of a choice."""
    content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
    thought = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
    calls = [
        {
            "id": begin.id,
            "type": "function",
            "function": {"name": begin.name, "arguments": arguments_of(deltas, begin.index)},
        }
        for begin in deltas
        if isinstance(begin, CallBegin)
    ]
    whole: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if thought:
        whole["reasoning_content"] = thought
    if calls:
        whole |= {"content": content or None, "tool_calls": calls}
    return whole


def arguments_of(deltas: Sequence[Delta], index: int) -> str:
    """The arguments of a call."""
    parts = (delta for delta in deltas if isinstance(delta, Arguments) and delta.index == index)
    return "".join(part.text for part in parts)


def _usage(prompt: int, drawn: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}
