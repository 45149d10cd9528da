"""OpenAI's requests: what bodies may say, checked before anything is done."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any, NoReturn

from ..requests import LOGPROBS, Limits, Sampling
from . import fields
from .errors import ApiError, bad
from .fields import Body
from .text import Text

CHOICES = 8
"""Prompts times `n` of one request, at most."""
STOPS = 4
STOP_LENGTH = 256
"""Characters of a stop string, at most."""
MESSAGES = 4096
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles of messages, and what templates call them."""
DEFAULT_TOKENS = {False: 16, True: None}
"""`max_tokens` of completions is 16, as OpenAI says; that of chats is the rest of the context."""


@dataclass(frozen=True)
class Completion:
    """A checked request: `prompts` times `n` choices."""

    is_chat: bool
    model: str
    prompts: tuple[tuple[int, ...], ...]
    n: int
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    ignore_eos: bool
    salt: bytes

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def tokens(self) -> int:
        """The most tokens of all choices; a log-probability beside a token counts as one."""
        drawn = self.max_tokens * (1 + (self.sampling.logprobs or 0))
        return sum(len(prompt) + drawn for prompt in self.prompts) * self.n


def parse(payload: bytes) -> dict[str, Any]:
    """Read a body: an object of JSON, in UTF-8, without NaN or lone surrogates."""
    try:
        text = payload.decode()
        body = json.loads(text, parse_constant=_constant)
        if "\\u" in text:  # the one way to write half a character
            json.dumps(body, ensure_ascii=False).encode()
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except UnicodeError:
        raise ApiError(400, "the body is not valid UTF-8, or has half a character") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}"[:300]) from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


def completion(body: Body, is_chat: bool, model: str, text: Text, limits: Limits) -> Completion:
    """Check the body of `/v1/completions` or `/v1/chat/completions`.

    Raises:
        ApiError: 400, or 404 for another model.
    """
    check_model(body, model)
    fields.refuse_others(body, "chat" if is_chat else "completions")
    stream = fields.boolean(body, "stream")
    options = fields.mapping(body, "stream_options")
    if options and not stream:
        bad("stream_options is only for stream=true", "stream_options")
    n = fields.integer(body, "n", 1, 1, CHOICES)
    if fields.integer(body, "best_of", n, 1, CHOICES) != n:
        bad("best_of other than n is not supported", "best_of")
    prompts = _chat(body, text) if is_chat else _prompts(body, text, limits)
    if len(prompts) * n > CHOICES:
        bad(f"prompts times n may be at most {CHOICES}", "n")
    room = limits.context - max(map(len, prompts))
    for prompt in prompts:
        if not prompt:
            bad("the prompt is empty", "prompt")
    if room < 1:
        _too_long(max(map(len, prompts)), limits)
    seed = fields.integer(body, "seed", None, -(1 << 63), (1 << 64) - 1)
    return Completion(
        is_chat,
        model,
        tuple(prompts),
        n,
        _max_tokens(body, is_chat, room, limits),
        Sampling(
            temperature=fields.number(body, "temperature", 1.0, 0.0, 2.0),
            top_k=_top_k(body, limits),
            top_p=_top_p(body),
            seed=secrets.randbits(63) if seed is None else seed % (1 << 63),
            logprobs=_logprobs(body, is_chat),
        ),
        _stops(body),
        stream,
        fields.boolean(options, "include_usage"),
        fields.boolean(body, "ignore_eos"),
        fields.string(body, "cache_salt").encode(),
    )


def check_model(body: Body, model: str) -> None:
    """Refuse a body that names another model; without a name it means ours.

    Raises:
        ApiError: 404 for another model.
    """
    name = fields.string(body, "model", model)
    if name != model:
        message = f"the model '{name[:100]}' does not exist; this server has '{model}'"
        raise ApiError(404, message, "model", "model_not_found")


def token_ids(found: object, param: str, limits: Limits) -> tuple[int, ...]:
    """A list of token ids that the model's embedding has a row for."""
    if not isinstance(found, list):
        bad(f"{param} must be a list of token ids", param)
    if len(found) > limits.context:
        _too_long(len(found), limits)
    for token in found:
        if type(token) is not int or not 0 <= token < limits.vocabulary:
            rows = limits.vocabulary
            allowed = f"the model's embedding has {rows} rows, for token ids 0 to {rows - 1}"
            bad(f"{param} has {_shown(token)}, and {allowed}", param)
    return tuple(found)


def _shown(token: object) -> str:
    """Describe something that stands for a token id, cut short."""
    return f"the token id {token}"[:60] if type(token) is int else "something that is no token id"


def messages(body: Body) -> list[dict[str, str]]:
    """Read the messages, each with `role` and `content`; parts of a content are joined."""
    entries = fields.required(body, "messages", "a list of them")
    if not isinstance(entries, list) or not 0 < len(entries) <= MESSAGES:
        bad(f"messages must be a list of 1 to {MESSAGES} messages", "messages")
    return [_message(entry) for entry in entries]


def _message(entry: object) -> dict[str, str]:
    role = entry.get("role") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(role, str) or role not in ROLES:
        bad(f"each message must be an object with a role, of {', '.join(ROLES)}", "messages")
    for name, value in entry.items():
        if name not in ("role", "content", "name") and value not in (None, [], {}):
            bad(f"{name[:100]} of a message is not supported", "messages")
    content = entry.get("content")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            bad("parts of a message must be of type text", "messages")
        content = "".join(part for part in parts if part is not None)
    if not isinstance(content, str):
        bad("each message must have a content of text", "messages")
    return {"role": ROLES[role], "content": content}


def _chat(body: Body, text: Text) -> list[tuple[int, ...]]:
    conversation = messages(body)
    try:
        return [tuple(text.encode_chat(conversation))]
    except ValueError as error:
        bad(str(error)[:300], "messages")


def _prompts(body: Body, text: Text, limits: Limits) -> list[tuple[int, ...]]:
    prompt = fields.required(body, "prompt", "a text, a list of token ids, or a list of these")
    if isinstance(prompt, str):
        return [tuple(text.encode(prompt))]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > CHOICES:
            bad(f"there may be at most {CHOICES} prompts", "prompt")
        if all(isinstance(item, str) for item in prompt):
            return [tuple(text.encode(item)) for item in prompt]
        return [token_ids(item, "prompt", limits) for item in prompt]
    return [token_ids(prompt, "prompt", limits)]


def _max_tokens(body: Body, is_chat: bool, room: int, limits: Limits) -> int:
    names = ["max_completion_tokens", "max_tokens"] if is_chat else ["max_tokens"]
    name = next((key for key in names if body.get(key) is not None), names[-1])
    asked = fields.integer(body, name, DEFAULT_TOKENS[is_chat], 1, None)
    if asked is None:
        return room
    if body.get(name) is not None and asked > room:
        message = (
            f"the prompt has {limits.context - room} tokens and {name} is {asked}, together more "
            f"than this model's context of {limits.context}"
        )
        raise ApiError(400, message, name, "context_length_exceeded")
    return min(asked, room)


def _top_k(body: Body, limits: Limits) -> int:
    top_k = int(fields.integer(body, "top_k", 0, -1, None))
    return 0 if top_k < 1 or top_k >= limits.vocabulary else top_k


def _top_p(body: Body) -> float:
    top_p = fields.number(body, "top_p", 1.0, 0.0, 1.0)
    return top_p or 1e-9  # 0 means the likeliest token, as elsewhere


def _logprobs(body: Body, is_chat: bool) -> int | None:
    """A number in completions; in chats a yes or no, with the number beside it."""
    if not is_chat:
        return fields.integer(body, "logprobs", None, 0, LOGPROBS)
    number = fields.integer(body, "top_logprobs", 0, 0, LOGPROBS)
    wants = fields.boolean(body, "logprobs")
    if body.get("top_logprobs") is not None and not wants:
        bad("top_logprobs is only for logprobs=true", "top_logprobs")
    return number if wants else None


def _stops(body: Body) -> tuple[str, ...]:
    stop = body.get("stop")
    listed = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(listed, list) or len(listed) > STOPS:
        bad(f"stop must be a string, or a list of at most {STOPS}", "stop")
    if not all(isinstance(string, str) and 0 < len(string) <= STOP_LENGTH for string in listed):
        bad(f"a stop string must have 1 to {STOP_LENGTH} characters", "stop")
    return tuple(listed)


def _too_long(length: int, limits: Limits) -> NoReturn:
    message = f"the prompt has {length} tokens, and this model's context is {limits.context}"
    raise ApiError(400, message, "prompt", "context_length_exceeded")


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
