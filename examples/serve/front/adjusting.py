"""Fields of bodies about how tokens are drawn: OpenAI's, and those that vLLM adds."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..requests import BAD_WORD, BAD_WORDS, BIASES, LOGPROBS, Adjustments, Limits, Sampling
from . import fields
from .errors import ApiError, bad
from .fields import Body
from .text import Bytes, Text

PENALTY = 2.0
"""The greatest penalty of frequency or presence, on either side of 0."""
BIAS = 100.0
"""The greatest bias, on either side of 0."""
REPETITION = 100.0
"""The greatest penalty of repetitions."""


@dataclass(frozen=True)
class Rules:
    """The bounds and defaults of requests.

    Attributes:
        choices: prompts times `n` of one request, at most.
        stops: strings that end one, at most.
        defaults: values of fields that a body does not have.
        max_tokens: of a chat that does not say it; None: as many as there is room for.
    """

    choices: int = 8
    stops: int = 4
    defaults: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None

    def shown(self) -> str:
        """The defaults, for the log."""
        chats = {} if self.max_tokens is None else {"max_tokens of chats": self.max_tokens}
        named = {**self.defaults, **chats}
        return ", ".join(f"{name} {value:g}" for name, value in named.items())


DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields whose defaults a model may bring, as vLLM takes them."""


def rules_of(folder: Path, rules: Rules) -> Rules:
    """The rules with the defaults of a model's `generation_config.json`, if it has one.

    Raises:
        ValueError: one of them is out of bounds.
    """
    file = folder / "generation_config.json"
    brought = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    defaults = {name: brought[name] for name in DEFAULTS if brought.get(name) is not None}
    most = brought.get("max_new_tokens")
    rules = replace(rules, defaults=defaults, max_tokens=most)
    try:
        read_sampling(defaults, False, Bytes(), Limits(1, 1, 1, 2, 1, 1, 1, ()))
        fields.integer({"max_new_tokens": most}, "max_new_tokens", 1, 1, None)
    except ApiError as error:
        raise ValueError(f"{file}: {error}; --generation-config none leaves it out") from None
    return rules


def read_sampling(
    body: Body, is_chat: bool, text: Text, limits: Limits
) -> tuple[Sampling, tuple[int, ...]]:
    """How tokens are drawn, and which of them end the text.

    Raises:
        ApiError: 400 with the field's name.
    """
    seed = fields.integer(body, "seed", None, -(1 << 63), (1 << 64) - 1)
    stops = _tokens(body, "stop_token_ids", limits)
    return Sampling(
        temperature=fields.number(body, "temperature", 1.0, 0.0, 2.0),
        top_k=_top_k(body, limits),
        top_p=fields.number(body, "top_p", 1.0, 0.0, 1.0) or 1e-9,  # 0 means the likeliest token
        seed=secrets.randbits(63) if seed is None else seed % (1 << 63),
        logprobs=_logprobs(body, is_chat),
        adjustments=_adjustments(body, stops, text, limits),
    ), stops


def _adjustments(
    body: Body, stops: tuple[int, ...], text: Text, limits: Limits
) -> Adjustments | None:
    """The changes of logits that a body asks for; None if it asks for none."""
    words = [word for string in _strings(body) for word in bad_words(string, text)]
    if any(len(word) > BAD_WORD for word in words):
        bad(f"a word of bad_words may have at most {BAD_WORD} tokens", "bad_words")
    several = tuple(word for word in words if len(word) > 1)
    if len(several) > BAD_WORDS:
        bad(f"bad_words may have at most {BAD_WORDS} words of several tokens", "bad_words")
    wanted = Adjustments(
        banned=tuple(sorted({word[0] for word in words if len(word) == 1})),
        allowed=_tokens(body, "allowed_token_ids", limits) or None,
        bad_words=several,
        min_tokens=fields.integer(body, "min_tokens", 0, 0, None),
        biases=_biases(body, limits),
        repetition=_repetition(body),
        frequency=fields.number(body, "frequency_penalty", 0.0, -PENALTY, PENALTY),
        presence=fields.number(body, "presence_penalty", 0.0, -PENALTY, PENALTY),
        min_p=fields.number(body, "min_p", 0.0, 0.0, 1.0),
    )
    if body.get("allowed_token_ids") == []:
        bad("allowed_token_ids must have at least one token", "allowed_token_ids")
    if wanted.min_tokens:
        eos = () if fields.boolean(body, "ignore_eos") else limits.eos
        wanted = replace(wanted, held=tuple(sorted({*stops, *eos})))
    if not wanted.held:
        wanted = replace(wanted, min_tokens=0)
    _check_left(wanted, limits)
    return None if wanted == Adjustments() else wanted


def bad_words(string: str, text: Text) -> list[tuple[int, ...]]:
    """The tokens of a word where it begins a text, and where it follows a space.

    The second are there only if they are as many as the first, as in vLLM: else they would be a
    space and the first.
    """
    plain = tuple(text.encode(string, special=False))
    spaced = tuple(text.encode(f" {string.lstrip()}", special=False))
    return [plain, spaced] if len(spaced) == len(plain) and spaced != plain else [plain]


def _check_left(wanted: Adjustments, limits: Limits) -> None:
    """Refuse what may leave no token to be drawn."""
    allowed = range(limits.vocabulary) if wanted.allowed is None else wanted.allowed
    taken = {*wanted.banned, *wanted.held, *(word[-1] for word in wanted.bad_words)}
    if taken.issuperset(allowed):
        message = "no token may be left to draw: bad_words, and stop tokens while there are fewer "
        bad(f"{message}than min_tokens, may take all that are allowed", "allowed_token_ids")


def _tokens(body: Body, name: str, limits: Limits) -> tuple[int, ...]:
    """Token ids in ascending order, each once."""
    listed = body.get(name)
    if listed is None:
        return ()
    if not isinstance(listed, list) or not all(_is_token(token, limits) for token in listed):
        bad(f"{name} must be a list of token ids from 0 to {limits.vocabulary - 1}", name)
    return tuple(sorted(set(listed)))


def _is_token(token: object, limits: Limits) -> bool:
    return type(token) is int and 0 <= token < limits.vocabulary


def _strings(body: Body) -> Iterable[str]:
    listed = body.get("bad_words")
    if listed is None:
        return ()
    if not isinstance(listed, list) or not all(isinstance(word, str) and word for word in listed):
        bad("bad_words must be a list of strings, none of them empty", "bad_words")
    return listed


def _biases(body: Body, limits: Limits) -> tuple[tuple[int, float], ...]:
    biases: dict[int, float] = {}
    for name, bias in fields.mapping(body, "logit_bias").items():
        if not name.isdecimal() or not name.isascii() or not _is_token(_number(name), limits):
            most = limits.vocabulary - 1
            bad(
                f"logit_bias has {name[:20]!r}, which is no token id from 0 to {most}", "logit_bias"
            )
        if type(bias) not in (int, float) or not -BIAS <= bias <= BIAS:
            bad(f"a bias of logit_bias must be a number from -{BIAS:g} to {BIAS:g}", "logit_bias")
        biases[int(name)] = float(bias)
    if len(biases) > BIASES:
        bad(f"logit_bias may have at most {BIASES} tokens", "logit_bias")
    return tuple(sorted(biases.items()))


def _number(name: str) -> int:
    return int(name) if len(name) < 12 else -1


def _repetition(body: Body) -> float:
    penalty = fields.number(body, "repetition_penalty", 1.0, 0.0, REPETITION)
    if not penalty:
        bad("repetition_penalty must be above 0", "repetition_penalty")
    return penalty


def _top_k(body: Body, limits: Limits) -> int:
    top_k = int(fields.integer(body, "top_k", 0, -1, None))
    return 0 if top_k < 1 or top_k >= limits.vocabulary else top_k


def _logprobs(body: Body, is_chat: bool) -> int | None:
    """A number in completions; in chats a yes or no, with the number beside it."""
    if not is_chat:
        return fields.integer(body, "logprobs", None, 0, LOGPROBS)
    number = fields.integer(body, "top_logprobs", 0, 0, LOGPROBS)
    wants = fields.boolean(body, "logprobs")
    if body.get("top_logprobs") is not None and not wants:
        bad("top_logprobs is only for logprobs=true", "top_logprobs")
    return number if wants else None
