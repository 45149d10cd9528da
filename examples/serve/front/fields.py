"""Fields of bodies: which there are, and how each is read.

Nothing is ignored in silence: a field is served, or changes no token of an answer, or is refused by
its name. A field that is null counts as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import bad

Body = Mapping[str, Any]

_BOTH = {
    *("model", "n", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "logprobs"),
    *("stream", "stream_options", "ignore_eos", "cache_salt", "frequency_penalty"),
    *("presence_penalty", "repetition_penalty", "min_p", "logit_bias", "stop_token_ids"),
    *("min_tokens", "bad_words", "allowed_token_ids", "include_stop_str_in_output"),
    *("skip_special_tokens", "truncate_prompt_tokens", "return_token_ids", "request_id"),
    *("prompt_logprobs", "response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
}
_POOLED = {"model", "truncate_prompt_tokens", "request_id"}
SERVED = {
    "completions": _BOTH | {"prompt", "best_of", "add_special_tokens", "echo"},
    "chat": _BOTH
    | {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"}
    | {"add_generation_prompt", "continue_final_message"}
    | {"tools", "tool_choice", "parallel_tool_calls"},
    "responses": {
        *("model", "input", "instructions", "max_output_tokens", "temperature", "top_p", "stream"),
        *("tools", "tool_choice", "parallel_tool_calls", "text", "cache_salt"),
    },
    "embeddings": _POOLED
    | {"input", "encoding_format", "dimensions", "add_special_tokens"}
    | {"normalize"},
    "score": _POOLED | {"text_1", "text_2", "data_1", "data_2", "queries", "documents"},
    "rerank": _POOLED | {"query", "documents", "top_n", "return_documents"},
}
IGNORED = {
    *("user", "metadata", "safety_identifier", "service_tier"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "store", "verbosity"),
}
"""Fields about the user, the price or what OpenAI keeps; they change no answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "background": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include": ([],),
    "include_reasoning": (True,),
    "kv_transfer_params": ({},),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "max_tokens_per_doc": (0,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "priority": (0,),
    "reasoning": ({},),
    "reasoning_effort": ("none",),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "truncation": ("disabled",),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
"""Values that ask for nothing, of fields that are refused otherwise."""
_OF_STREAMS = {"include_usage", "continuous_usage_stats"}


def refuse_others(body: Body, api: str) -> None:
    """Refuse fields that would change the answer, but are not served.

    Raises:
        ApiError: 400 with the field's name.
    """
    for name, value in body.items():
        if value is None or name in SERVED[api] or name in IGNORED:
            continue
        neutral = NEUTRAL.get(name, ())
        if not any(type(value) is type(candidate) and value == candidate for candidate in neutral):
            shown = name[:100]
            usual = f": leave it out, or at {neutral[0]!r}" if neutral else ""
            bad(f"{shown} is not supported by this endpoint{usual}", shown)
    for name, value in mapping(body, "stream_options").items():
        if value not in (None, False) and name not in _OF_STREAMS:
            bad(f"stream_options.{name[:100]} is not supported", "stream_options")


def required(body: Body, name: str, kind: str) -> Any:
    """The value of a field that has to be there."""
    value = body.get(name)
    if value is None:
        bad(f"{name} is missing: give {kind}", name)
    return value


def string(body: Body, name: str, default: str = "") -> str:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str) or len(value) > 1024:
        bad(f"{name} must be a string of at most 1024 characters", name)
    return value


def boolean(body: Body, name: str, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        bad(f"{name} must be true or false", name)
    return value


def mapping(body: Body, name: str) -> Body:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        bad(f"{name} must be an object", name)
    return value


def integer(body: Body, name: str, default: Any, least: int, most: int | None) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int:
        bad(f"{name} must be a whole number", name)
    if value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        bad(f"{name} must be {bounds}", name)
    return value


def number(body: Body, name: str, default: float, least: float, most: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not least <= value <= most:
        bad(f"{name} must be a number from {least:g} to {most:g}", name)
    return float(value)
