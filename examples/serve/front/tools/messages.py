"""Messages of a chat, as templates take them: with calls of tools, and what came of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .. import fields
from ..errors import bad
from ..fields import Body

MESSAGES = 4096
CALLS = 1024
"""Calls of a message, at most."""
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Roles of messages, and what templates call them."""
_OF_ROLES = {
    "assistant": {"tool_calls", "reasoning_content", "reasoning"},
    "tool": {"tool_call_id"},
}
"""Fields beside `role`, `content` and `name`."""


def messages(body: Body) -> list[dict[str, Any]]:
    """Read the messages, each with `role` and `content`; parts of a content are joined.

    Raises:
        ApiError: 400, for what is no list of messages.
    """
    entries = fields.required(body, "messages", "a list of them")
    if not isinstance(entries, list) or not 0 < len(entries) <= MESSAGES:
        bad(f"messages must be a list of 1 to {MESSAGES} messages", "messages")
    names: dict[str, str] = {}  # of called tools, by the identifiers of their calls
    return [_message(entry, names) for entry in entries]


def _message(entry: object, names: dict[str, str]) -> dict[str, Any]:
    role = entry.get("role") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(role, str) or role not in ROLES:
        bad(f"each message must be an object with a role, of {', '.join(ROLES)}", "messages")
    known = {"role", "content", "name"} | _OF_ROLES.get(role, set())
    for name, value in entry.items():
        if name not in known and value not in (None, [], {}):
            bad(f"{name[:100]} of a message is not supported", "messages")
    message: dict[str, Any] = {"role": ROLES[role]}
    calls = entry.get("tool_calls") if role == "assistant" else None
    if calls:
        message["tool_calls"] = _calls(calls, names)
    is_optional = role == "assistant" and (calls or _thought(entry))
    message["content"] = _content(entry.get("content"), bool(is_optional))
    if role == "assistant" and (thought := _thought(entry)):
        message["reasoning_content"] = thought
    if role == "tool":
        id_ = fields.string(entry, "tool_call_id")
        name = fields.string(entry, "name", names.get(id_, ""))
        message |= {"tool_call_id": id_} | ({"name": name} if name else {})
    return message


def _content(content: object, is_optional: bool) -> str:
    if content is None and is_optional:
        return ""
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
    return content


def _thought(entry: Mapping[str, Any]) -> str:
    thought = entry.get("reasoning_content") or entry.get("reasoning") or ""
    if not isinstance(thought, str):
        bad("reasoning_content of a message must be a string", "messages")
    return thought


def _calls(calls: object, names: dict[str, str]) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or len(calls) > CALLS:
        bad(f"tool_calls of a message must be a list of at most {CALLS}", "messages")
    return [_call(call, names) for call in calls]


def _call(call: object, names: dict[str, str]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        bad("each of tool_calls must have a function", "messages")
    name, text = function.get("name"), function.get("arguments") or "{}"
    if not isinstance(name, str) or not isinstance(text, str):
        bad("a call must have a name, and arguments as a string of JSON", "messages")
    try:
        arguments = json.loads(text)
    except (RecursionError, ValueError) as error:
        bad(f"the arguments of a call of {name[:64]} are no JSON: {error}"[:300], "messages")
    if not isinstance(arguments, dict):
        bad(f"the arguments of a call of {name[:64]} are no object", "messages")
    id_ = fields.string(call, "id")
    names[id_] = name
    # Templates write arguments as JSON, and would write a string as a string in a string.
    function = {"name": name, "arguments": arguments}
    return {"id": id_, "type": "function", "function": function}
