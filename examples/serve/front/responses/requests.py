"""Bodies of `/v1/responses`, as bodies of chats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from .. import fields
from ..errors import bad
from ..fields import Body

ITEMS = 4096
_SAME = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "cache_salt")
"""Fields that chats have, too."""
_SHOWN = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p", "user")
"""Fields that an answer repeats."""


def as_chat(body: Body) -> dict[str, Any]:
    """The chat that a body asks for.

    Raises:
        ApiError: 400, for what is not served.
    """
    fields.refuse_others(body, "responses")
    chat: dict[str, Any] = {name: body[name] for name in _SAME if body.get(name) is not None}
    chat["messages"] = _messages(body)
    chat["max_completion_tokens"] = body.get("max_output_tokens")
    if (listed := body.get("tools")) is not None:
        if not isinstance(listed, list):
            bad("tools must be a list", "tools")
        chat["tools"] = [_tool(entry) for entry in listed]
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    chat["tool_choice"] = choice
    chat["response_format"] = _format(fields.mapping(body, "text"))
    return chat


def shown(body: Body) -> dict[str, Any]:
    """The fields that an answer repeats."""
    text = fields.mapping(body, "text")
    return {
        **{name: body.get(name) for name in _SHOWN},
        "metadata": fields.mapping(body, "metadata"),
        "parallel_tool_calls": fields.boolean(body, "parallel_tool_calls", True),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "text": {"format": text.get("format") or {"type": "text"}},
    }


def _messages(body: Body) -> list[dict[str, Any]]:
    items = fields.required(body, "input", "a text, or a list of items")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or len(items) > ITEMS:
        bad(f"input must be a text, or a list of at most {ITEMS} items", "input")
    messages: list[dict[str, Any]] = []
    instructions = body.get("instructions")
    if instructions is not None:
        if not isinstance(instructions, str):
            bad("instructions must be a string", "instructions")
        messages.append({"role": "system", "content": instructions})
    thought = ""
    for item in items:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "reasoning":
            thought = _text(item.get("content") or [])
            continue
        message = _message(item, kind)
        last = messages[-1] if messages else {}
        if kind == "function_call" and last.get("role") == "assistant" and not thought:
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
            continue
        if thought and message["role"] == "assistant":
            message["reasoning_content"] = thought
        thought = ""
        messages.append(message)
    return messages


def _message(item: Any, kind: object) -> dict[str, Any]:
    if kind == "message":
        return {"role": item.get("role"), "content": _text(item.get("content"))}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        content = _text(item.get("output"))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    _wrong("items of input must be messages, function_call or function_call_output")
    return None


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _wrong("an item of input must have a content of text")
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        _wrong("parts of an item of input must be texts")
    return "".join(map(str, texts))


def _wrong(message: str) -> NoReturn:
    bad(message, "input")


def _tool(entry: object) -> dict[str, Any]:
    if not isinstance(entry, dict) or entry.get("type") != "function":
        bad("each tool must have the type function", "tools")
    return {
        "type": "function",
        "function": {name: value for name, value in entry.items() if name != "type"},
    }


def _format(text: Body) -> dict[str, Any] | None:
    """`text.format`, as `response_format` of chats has it."""
    unknown = [name for name, value in text.items() if name != "format" and value is not None]
    if unknown:
        bad(f"text.{unknown[0][:100]} is not supported", "text")
    chosen = dict(fields.mapping(text, "format"))
    if chosen.get("type") != "json_schema":
        return chosen or None
    del chosen["type"]
    return {"type": "json_schema", "json_schema": chosen}
