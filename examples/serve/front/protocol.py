"""OpenAI's requests and errors: what bodies may say, checked before anything is done."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ..work import Limits, Sampling
from .text import Text

CHOICES = 8
"""Prompts times `n` of one request, at most."""
STOPS = 4
STOP_LENGTH = 256
"""Characters of a stop string, at most."""
MESSAGES = 4096
DEFAULT_TOKENS = {False: 16, True: None}
"""`max_tokens` of completions is 16, as OpenAI says; that of chats is what the context leaves."""

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """What a client is told, in OpenAI's shape.

    Attributes:
        status: of HTTP.
        param: the field of the body that it is about.
        code: a word for programs.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


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
        """The most that all choices together can be long."""
        return sum(len(each) + self.max_tokens for each in self.prompts) * self.n


def parse(payload: bytes) -> dict[str, Any]:
    """Read a body: an object of JSON, in UTF-8, without NaN or lone surrogates."""
    try:
        text = payload.decode()
        found = json.loads(text, parse_constant=_constant)
        if "\\u" in text:  # the one way to write half a character
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except UnicodeError:
        raise ApiError(400, "the body is not valid UTF-8, or has half a character") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}"[:300]) from None
    if not isinstance(found, dict):
        raise ApiError(400, "the body must be a JSON object")
    return found


def completion(
    body: Mapping[str, Any], is_chat: bool, model: str, text: Text, limits: Limits
) -> Completion:
    """Check the body of `/v1/completions` or `/v1/chat/completions`.

    Raises:
        ApiError: 400, or 404 for another model.
    """
    check_model(body, model)
    _refuse_unsupported(body)
    stream = _boolean(body, "stream", False)
    options = _object(body, "stream_options")
    if options and not stream:
        _bad("stream_options is only for stream=true", "stream_options")
    n = _integer(body, "n", 1, 1, CHOICES)
    prompts = _chat(body, text) if is_chat else _prompts(body, text, limits)
    if len(prompts) * n > CHOICES:
        _bad(f"prompts times n may be at most {CHOICES}", "n")
    room = limits.context - max(map(len, prompts))
    for prompt in prompts:
        if not prompt:
            _bad("the prompt is empty", "prompt")
    if room < 1:
        _too_long(max(map(len, prompts)), limits)
    seed = _integer(body, "seed", None, -(1 << 63), (1 << 64) - 1)
    return Completion(
        is_chat,
        model,
        tuple(prompts),
        n,
        _max_tokens(body, is_chat, room, limits),
        Sampling(
            temperature=_number(body, "temperature", 1.0, 0.0, 2.0),
            top_k=_top_k(body, limits),
            top_p=_top_p(body),
            seed=secrets.randbits(63) if seed is None else seed % (1 << 63),
        ),
        _stops(body),
        stream,
        _boolean(options, "include_usage", False),
        _boolean(body, "ignore_eos", False),
        _string(body, "cache_salt").encode(),
    )


def check_model(body: Mapping[str, Any], model: str) -> None:
    """Raises ApiError 404 if the body names another model; none is ours."""
    name = _string(body, "model", model)
    if name != model:
        message = f"the model '{name[:100]}' does not exist; this server has '{model}'"
        raise ApiError(404, message, "model", "model_not_found")


def token_ids(found: object, param: str, limits: Limits) -> tuple[int, ...]:
    """A list of token ids below the vocabulary's size."""
    if not isinstance(found, list):
        _bad(f"{param} must be a list of token ids", param)
    if len(found) > limits.context:
        _too_long(len(found), limits)
    for token in found:
        if type(token) is not int or not 0 <= token < limits.vocabulary:
            _bad(f"{param} has a token id that is none below {limits.vocabulary}", param)
    return tuple(found)


def messages(body: Mapping[str, Any]) -> list[dict[str, str]]:
    """Messages with `role` and `content`, whose parts are joined."""
    found = body.get("messages")
    if not isinstance(found, list) or not 0 < len(found) <= MESSAGES:
        _bad(f"messages must be a list of 1 to {MESSAGES} messages", "messages")
    return [_message(each) for each in found]


def _message(each: object) -> dict[str, str]:
    if not isinstance(each, dict) or not isinstance(each.get("role"), str):
        _bad("each message must be an object with a role", "messages")
    content = each.get("content")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            _bad("parts of a message must be of type text", "messages")
        content = "".join(part for part in parts if part is not None)
    if not isinstance(content, str):
        _bad("each message must have a content of text", "messages")
    return {"role": each["role"], "content": content}


def _chat(body: Mapping[str, Any], text: Text) -> list[tuple[int, ...]]:
    found = messages(body)
    try:
        return [tuple(text.encode_chat(found))]
    except ValueError as error:
        _bad(str(error)[:300], "messages")


def _prompts(body: Mapping[str, Any], text: Text, limits: Limits) -> list[tuple[int, ...]]:
    found = body.get("prompt")
    if isinstance(found, str):
        return [tuple(text.encode(found))]
    if isinstance(found, list) and found and isinstance(found[0], str | list):
        if len(found) > CHOICES:
            _bad(f"there may be at most {CHOICES} prompts", "prompt")
        if all(isinstance(each, str) for each in found):
            return [tuple(text.encode(each)) for each in found]
        return [token_ids(each, "prompt", limits) for each in found]
    return [token_ids(found, "prompt", limits)]


def _max_tokens(body: Mapping[str, Any], is_chat: bool, room: int, limits: Limits) -> int:
    names = ["max_completion_tokens", "max_tokens"] if is_chat else ["max_tokens"]
    name = next((each for each in names if body.get(each) is not None), names[-1])
    asked = _integer(body, name, DEFAULT_TOKENS[is_chat], 1, None)
    if asked is None:
        return room
    if body.get(name) is not None and asked > room:
        message = (
            f"the prompt has {limits.context - room} tokens and {name} is {asked}, together more "
            f"than this model's context of {limits.context}"
        )
        raise ApiError(400, message, name, "context_length_exceeded")
    return min(asked, room)


def _top_k(body: Mapping[str, Any], limits: Limits) -> int:
    found = int(_integer(body, "top_k", 0, -1, None))
    return 0 if found < 1 or found >= limits.vocabulary else found


def _top_p(body: Mapping[str, Any]) -> float:
    found = _number(body, "top_p", 1.0, 0.0, 1.0)
    return found or 1e-9  # 0 means the likeliest token, as elsewhere


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    found = body.get("stop")
    listed = [] if found is None else [found] if isinstance(found, str) else found
    if not isinstance(listed, list) or len(listed) > STOPS:
        _bad(f"stop must be a string, or a list of at most {STOPS}", "stop")
    if not all(isinstance(each, str) and 0 < len(each) <= STOP_LENGTH for each in listed):
        _bad(f"a stop string must have 1 to {STOP_LENGTH} characters", "stop")
    return tuple(listed)


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    """What would change the answer, and is not done, is an error and never ignored."""
    for name in ("logprobs", "top_logprobs", "logit_bias", "tools", "functions", "suffix"):
        if body.get(name) not in (None, False, 0, [], {}, ""):
            _bad(f"{name} is not supported", name)
    for name, neutral in (
        ("presence_penalty", 0),
        ("frequency_penalty", 0),
        ("repetition_penalty", 1),
    ):
        if _number(body, name, float(neutral), -2.0, 2.0) != neutral:
            _bad(f"{name} is not supported: leave it at {neutral}", name)
    if _boolean(body, "echo", False):
        _bad("echo is not supported", "echo")
    n = _integer(body, "n", 1, 1, CHOICES)
    if _integer(body, "best_of", n, 1, CHOICES) != n:
        _bad("best_of other than n is not supported", "best_of")
    kind = _object(body, "response_format").get("type", "text")
    if kind != "text":
        _bad("only response_format of type text is supported", "response_format")


def _string(body: Mapping[str, Any], name: str, default: str = "") -> str:
    found = body.get(name)
    if found is None:
        return default
    if not isinstance(found, str) or len(found) > 1024:
        _bad(f"{name} must be a string of at most 1024 characters", name)
    return found


def _boolean(body: Mapping[str, Any], name: str, default: bool) -> bool:
    found = body.get(name)
    if found is None:
        return default
    if not isinstance(found, bool):
        _bad(f"{name} must be true or false", name)
    return found


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = body.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict):
        _bad(f"{name} must be an object", name)
    return found


def _integer(body: Mapping[str, Any], name: str, default: Any, least: int, most: int | None) -> Any:
    found = body.get(name)
    if found is None:
        return default
    if type(found) is not int:
        _bad(f"{name} must be a whole number", name)
    if found < least or (most is not None and found > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        _bad(f"{name} must be {bounds}", name)
    return found


def _number(body: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    found = body.get(name)
    if found is None:
        return default
    if type(found) not in (int, float) or not least <= found <= most:
        _bad(f"{name} must be a number from {least:g} to {most:g}", name)
    return float(found)


def _too_long(length: int, limits: Limits) -> NoReturn:
    message = f"the prompt has {length} tokens, and this model's context is {limits.context}"
    raise ApiError(400, message, "prompt", "context_length_exceeded")


def _bad(message: str, param: str) -> NoReturn:
    raise ApiError(400, message, param, "invalid_value")


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
