"""OpenAI's requests: what bodies may say, checked before anything is done."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ..requests import LOGPROBS, Limits, Sampling
from . import fields
from .adjusting import Rules, read_sampling
from .errors import ApiError, bad
from .fields import Body
from .names import Names
from .text import Text
from .tools.dialects import Dialect
from .tools.messages import messages
from .tools.outputs import Output, check_known, output_of_chat, output_of_completion
from .tools.toolset import Toolset, toolset

STOP_LENGTH = 256
"""Characters of a stop string, at most."""
RESERVED = {
    *("conversation", "messages", "tools", "documents", "chat_template", "tokenize", "padding"),
    *("truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
    *("return_assistant_tokens_mask", "add_generation_prompt", "continue_final_message"),
}
"""Names that are no variables of templates."""
PLAIN = Dialect()
TEXT = Output()
DEFAULT_TOKENS = 16
"""`max_tokens` of completions, as OpenAI says; that of chats is the rest of the context."""


@dataclass(frozen=True)
class Completion:
    """A checked request: `prompts` times `n` choices.

    Attributes:
        stop: strings that end a text; `ends` are tokens that do, beside those of the model.
        min_tokens: tokens ahead of any such end.
        continuous_usage: whether each chunk of a stream has counts.
        keeps_stop: whether the text has the string or token that ends it.
        shows_special: whether the text has special tokens.
        shows_ids: whether the answer has the ids of its tokens and of the prompt's.
        continues: whether the text goes on with that of the prompt, and begins none.
        id: what names the answer; empty: a random one.
        echoes: the texts of the prompts, with which the choices begin; empty: they do not.
        prompt_logprobs: the number of the likeliest tokens that the answer has for each token of
            the prompt, beside that one; None: neither.
        is_silent: whether no token is wanted; the engine draws one.
        output: how each text is written and read.
        response: what an answer of `/v1/responses` repeats; None for others.
        adapter: its number, from 1; 0: none.
    """

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
    ends: tuple[int, ...] = ()
    min_tokens: int = 0
    continuous_usage: bool = False
    keeps_stop: bool = False
    shows_special: bool = False
    shows_ids: bool = False
    continues: bool = False
    id: str = ""
    echoes: tuple[str, ...] = ()
    prompt_logprobs: int | None = None
    is_silent: bool = False
    output: Output = TEXT
    response: dict[str, Any] | None = None
    adapter: int = 0

    @property
    def asked_logprobs(self) -> int | None:
        """The likeliest tokens of each position of the prompt; None if nobody asks."""
        wanted = [self.prompt_logprobs, self.sampling.logprobs if self.echoes else None]
        return max((number for number in wanted if number is not None), default=None)

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def tokens(self) -> int:
        """The most tokens of all choices; a log-probability beside a token counts as one."""
        drawn = self.max_tokens * (1 + (self.sampling.logprobs or 0))
        of_prompt = 1 + (self.asked_logprobs or 0)
        return sum(len(prompt) * of_prompt + drawn for prompt in self.prompts) * self.n


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


def completion(
    body: Body,
    is_chat: bool,
    names: Names,
    text: Text,
    limits: Limits,
    rules: Rules | None = None,
    dialect: Dialect = PLAIN,
) -> Completion:
    """Check the body of `/v1/completions` or `/v1/chat/completions`.

    Args:
        names: of the model and its adapters.
        dialect: how the model writes calls and thoughts.

    Raises:
        ApiError: 400, or 404 for another name.
    """
    rules = rules or Rules()
    model, adapter = names.asked(body)
    fields.refuse_others(body, "chat" if is_chat else "completions")
    body = {**rules.defaults, **{name: value for name, value in body.items() if value is not None}}
    stream = fields.boolean(body, "stream")
    options = fields.mapping(body, "stream_options")
    if options and not stream:
        bad("stream_options is only for stream=true", "stream_options")
    n = fields.integer(body, "n", 1, 1, rules.choices)
    if fields.integer(body, "best_of", n, 1, rules.choices) != n:
        bad("best_of other than n is not supported", "best_of")
    tools = toolset(body) if is_chat else None
    check_known(tools, dialect)
    if is_chat:
        prompts = [_chat(body, text, tools)]
    else:
        prompts = _prompts(body, text, limits, rules.choices)
    prompts = _truncated(body, prompts, limits)
    if len(prompts) * n > rules.choices:
        bad(f"prompts times n may be at most {rules.choices}; see --choices", "n")
    room = limits.context - max(map(len, prompts))
    for prompt in prompts:
        if not prompt:
            bad("the prompt is empty", "prompt")
    if room < 1:
        _too_long(max(map(len, prompts)), limits)
    sampling, ends = read_sampling(body, is_chat, text, limits)
    echo, asked = fields.boolean(body, "echo"), _prompt_logprobs(body, stream)
    default = rules.max_tokens if is_chat else DEFAULT_TOKENS
    least = 0 if echo or asked is not None else 1
    max_tokens = _max_tokens(body, is_chat, room, limits, default, least)
    min_tokens = fields.integer(body, "min_tokens", 0, 0, None)
    if is_chat:
        output = output_of_chat(body, tools, text, dialect, prompts[0])
    else:
        output = output_of_completion(body)
    if output.grammar:
        for name in ("ignore_eos", "min_tokens"):
            if body.get(name):
                bad(f"{name} is not for a structure, which ends the text", name)
    if min_tokens > max_tokens:
        bad(f"min_tokens may be at most the tokens of the answer, {max_tokens}", "min_tokens")
    return Completion(
        is_chat,
        model,
        tuple(prompts),
        n,
        max(1, max_tokens),
        sampling,
        _stops(body, rules.stops),
        stream,
        fields.boolean(options, "include_usage"),
        fields.boolean(body, "ignore_eos"),
        fields.string(body, "cache_salt").encode(),
        ends=ends,
        min_tokens=min_tokens,
        continuous_usage=fields.boolean(options, "continuous_usage_stats"),
        keeps_stop=fields.boolean(body, "include_stop_str_in_output"),
        shows_special=not fields.boolean(body, "skip_special_tokens", True),
        shows_ids=fields.boolean(body, "return_token_ids"),
        continues=not is_chat or fields.boolean(body, "continue_final_message"),
        id=fields.string(body, "request_id"),
        echoes=_echoes(body, prompts, text) if echo else (),
        prompt_logprobs=asked,
        is_silent=not max_tokens,
        output=output,
        adapter=adapter,
    )


def token_ids(ids: object, param: str, limits: Limits) -> tuple[int, ...]:
    """A list of token ids that the model's embedding has a row for."""
    if not isinstance(ids, list):
        bad(f"{param} must be a list of token ids", param)
    if len(ids) > limits.context:
        _too_long(len(ids), limits)
    for token in ids:
        if type(token) is not int or not 0 <= token < limits.vocabulary:
            rows = limits.vocabulary
            allowed = f"the model's embedding has {rows} rows, for token ids 0 to {rows - 1}"
            bad(f"{param} has {_shown(token)}, and {allowed}", param)
    return tuple(ids)


def _shown(token: object) -> str:
    """Describe something that stands for a token id, cut short."""
    return f"the token id {token}"[:60] if type(token) is int else "something that is no token id"


def _chat(body: Body, text: Text, tools: Toolset | None) -> tuple[int, ...]:
    """The tokens of a chat."""
    conversation, options = messages(body), template_options(body)
    if options["continue_final_message"] and conversation[-1]["role"] != "assistant":
        bad("continue_final_message needs a last message of the assistant", "messages")
    try:
        shown = [] if tools is None else [function.described for function in tools.shown]
        return tuple(text.encode_chat(conversation, options, shown))
    except ValueError as error:
        bad(str(error)[:300], "messages")


def template_options(body: Body) -> Mapping[str, Any]:
    """The variables of a chat's template besides the messages."""
    goes_on = fields.boolean(body, "continue_final_message")
    begins = fields.boolean(body, "add_generation_prompt", True)
    if goes_on and begins:
        bad("continue_final_message needs add_generation_prompt=false", "continue_final_message")
    more = fields.mapping(body, "chat_template_kwargs")
    for name in more:
        if name in RESERVED or not name.isidentifier():
            bad(f"chat_template_kwargs may not have {name}", "chat_template_kwargs")
    return {"add_generation_prompt": begins, "continue_final_message": goes_on, **more}


def _prompts(body: Body, text: Text, limits: Limits, most: int) -> list[tuple[int, ...]]:
    """The prompts of a completion, at most so many."""
    kinds = "a text, a list of token ids, or a list of these"
    prompt, special = fields.required(body, "prompt", kinds), _adds_special(body)
    if isinstance(prompt, str):
        return [tuple(text.encode(prompt, special))]
    if not isinstance(prompt, list):
        bad(f"prompt must be {kinds}", "prompt")
    if prompt and isinstance(prompt[0], str | list):
        if len(prompt) > most:
            bad(f"there may be at most {most} prompts; see --choices", "prompt")
        if all(isinstance(item, str) for item in prompt):
            return [tuple(text.encode(item, special)) for item in prompt]
        return [token_ids(item, "prompt", limits) for item in prompt]
    return [token_ids(prompt, "prompt", limits)]


def _adds_special(body: Body) -> bool:
    return fields.boolean(body, "add_special_tokens", True)


def _truncated(body: Body, prompts: list[tuple[int, ...]], limits: Limits) -> list[tuple[int, ...]]:
    """The prompts' last tokens, if a body says how many; -1 means as many as there is room for."""
    length = fields.integer(body, "truncate_prompt_tokens", None, -1, limits.context)
    if length is None:
        return prompts
    if not length:
        bad("truncate_prompt_tokens must be -1, or at least 1", "truncate_prompt_tokens")
    if length == -1:
        drawn = body.get("max_completion_tokens", body.get("max_tokens", 1))
        length = max(1, limits.context - (drawn if type(drawn) is int else 1))
    return [prompt[-length:] for prompt in prompts]


def _max_tokens(
    body: Body, is_chat: bool, room: int, limits: Limits, default: int | None, least: int
) -> int:
    names = ["max_completion_tokens", "max_tokens"] if is_chat else ["max_tokens"]
    name = next((key for key in names if body.get(key) is not None), names[-1])
    asked = fields.integer(body, name, default, least, None)
    if asked is None:
        return room
    if body.get(name) is not None and asked > room:
        message = (
            f"the prompt has {limits.context - room} tokens and {name} is {asked}, together more "
            f"than this model's context of {limits.context}"
        )
        raise ApiError(400, message, name, "context_length_exceeded")
    return min(asked, room)


def _echoes(body: Body, prompts: list[tuple[int, ...]], text: Text) -> tuple[str, ...]:
    """The texts of the prompts: as they were given, if they are whole."""
    prompt = body["prompt"]
    listed = prompt if isinstance(prompt, list) else [prompt]
    if isinstance(listed[0], str) and body.get("truncate_prompt_tokens") is None:
        return tuple(listed)
    return tuple(text.decode(ids) for ids in prompts)


def _prompt_logprobs(body: Body, stream: bool) -> int | None:
    number: int | None = fields.integer(body, "prompt_logprobs", None, 0, LOGPROBS)
    if number is not None and stream:
        bad("prompt_logprobs is only for stream=false", "prompt_logprobs")
    return number


def _stops(body: Body, most: int) -> tuple[str, ...]:
    stop = body.get("stop")
    listed = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(listed, list) or len(listed) > most:
        bad(f"stop must be a string, or a list of at most {most}; see --stops", "stop")
    if not all(isinstance(string, str) and 0 < len(string) <= STOP_LENGTH for string in listed):
        bad(f"a stop string must have 1 to {STOP_LENGTH} characters", "stop")
    return tuple(listed)


def _too_long(length: int, limits: Limits) -> NoReturn:
    message = f"the prompt has {length} tokens, and this model's context is {limits.context}"
    raise ApiError(400, message, "prompt", "context_length_exceeded")


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
