"""The tools of a request: `tools`, `tool_choice` and `parallel_tool_calls`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import fields
from ..errors import bad
from ..fields import Body

TOOLS = 1024
"""Tools of a request, at most."""
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_FIELDS = {"name", "description", "parameters", "strict"}


@dataclass(frozen=True)
class Function:
    """A tool.

    Attributes:
        described: as templates take it.
        strict: whether its arguments have to be valid whenever it is called.
    """

    name: str
    parameters: Mapping[str, Any]
    described: Mapping[str, Any]
    strict: bool


@dataclass(frozen=True)
class Toolset:
    """The tools that a text may call, or has to.

    Attributes:
        shown: all of them.
        callable: those of which one is called, if `is_forced`; else those that may be.
        parallel: whether several calls may be in one answer.
    """

    shown: tuple[Function, ...]
    callable: tuple[Function, ...]
    is_forced: bool
    parallel: bool

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The parameters of each tool."""
        return {function.name: function.parameters for function in self.shown}

    @property
    def is_strict(self) -> bool:
        """Whether the arguments of some tool have to be valid."""
        return any(function.strict for function in self.callable)


def toolset(body: Body) -> Toolset | None:
    """The tools that a body offers; None if nothing may be called.

    Raises:
        ApiError: 400, for tools that are none.
    """
    listed, choice = body.get("tools"), body.get("tool_choice")
    parallel = fields.boolean(body, "parallel_tool_calls", True)
    if listed is None or listed == []:
        if choice not in (None, "none", "auto"):
            bad("tool_choice needs tools", "tool_choice")
        return None
    if not isinstance(listed, list) or len(listed) > TOOLS:
        bad(f"tools must be a list of at most {TOOLS}", "tools")
    functions = tuple(_function(entry) for entry in listed)
    names = {function.name: function for function in functions}
    if len(names) < len(functions):
        bad("two tools have the same name", "tools")
    if choice == "none":
        return None
    if choice in (None, "auto", "required"):
        return Toolset(functions, functions, choice == "required", parallel)
    named = choice.get("function") if isinstance(choice, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(name, str) or choice.get("type") != "function":
        bad("tool_choice must be none, auto, required or a function's name", "tool_choice")
    if name not in names:
        bad(f"tool_choice names {name[:100]}, which is no tool", "tool_choice")
    return Toolset(functions, (names[name],), True, False)


def _function(entry: object) -> Function:
    kind = entry.get("type") if isinstance(entry, dict) else None
    described = entry.get("function") if isinstance(entry, dict) else None
    if kind != "function" or not isinstance(described, dict):
        bad("each tool must have the type function, and a function", "tools")
    for key, value in described.items():
        if key not in _FIELDS and value is not None:
            bad(f"{key[:100]} of a tool is not supported", "tools")
    name, text = described.get("name"), described.get("description")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        bad("a tool's name must have 1 to 64 letters, digits, dots, dashes, underscores", "tools")
    if not isinstance(text, str | None):
        bad(f"the description of {name} must be a string", "tools")
    parameters = described.get("parameters")
    parameters = {"type": "object", "properties": {}} if parameters is None else parameters
    if not isinstance(parameters, dict):
        bad(f"the parameters of {name} must be a JSON schema", "tools")
    strict = fields.boolean(described, "strict")
    shown = {"name": name, "description": text or "", "parameters": parameters}
    return Function(name, parameters, {"type": "function", "function": shown}, strict)
