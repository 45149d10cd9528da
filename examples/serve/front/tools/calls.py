"""Calls as JSON: objects with a name and arguments, alone or in a list."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from itertools import count

from .deltas import Arguments, CallBegin, Content, Delta, JsonValue

_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


def call_id() -> str:
    """An identifier of a call."""
    return f"call_{secrets.token_hex(12)}"


class Numbers:
    """Numbers and identifiers of the calls of one answer.

    Attributes:
        begun: how many there are.
    """

    def __init__(self, new_id: Callable[[], str] = call_id) -> None:
        self._new_id, self._count, self.begun = new_id, count(), 0

    def begin(self, name: str) -> CallBegin:
        self.begun += 1
        return CallBegin(next(self._count), self._new_id(), name)

    def whole(self, name: str, arguments: str) -> list[Delta]:
        """A call whose arguments are known."""
        begin = self.begin(name)
        return [begin, Arguments(begin.index, arguments)]


class JsonCalls:
    """Objects with `name`, and `arguments` or `parameters`, with anything of a list around them.

    Arguments are given as they come, where the name is in front of them. Other text is content.
    """

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._object: JsonValue | None = None
        self._text = ""  # of the object so far
        self._arguments: JsonValue | None = None
        self._index = -1
        self._stray = ""

    def feed(self, text: str) -> list[Delta]:
        """The deltas of a piece of text."""
        deltas: list[Delta] = []
        while text:
            if self._object is None:
                start = text.find("{")
                before = text if start < 0 else text[:start]
                self._stray += before.strip(" \t\r\n[],;")
                if start < 0:
                    break
                text, self._object = text[start:], JsonValue()
            size = self._object.feed(text)
            deltas += self._take(text[:size])
            text = text[size:]
            if self._object.is_done:
                deltas += self._finish()
        return deltas

    def close(self) -> list[Delta]:
        """The deltas of what is left."""
        deltas = self._finish()
        if self._stray:
            deltas.append(Content(self._stray))
            self._stray = ""
        return deltas

    def _take(self, text: str) -> list[Delta]:
        if self._index >= 0:
            return self._stream(text)
        self._text += text
        head = _HEAD.match(self._text)
        if head is None:
            return []
        begin = self._numbers.begin(json.loads(head[1]))
        self._index, self._arguments = begin.index, JsonValue()
        return [begin, *self._stream(self._text[head.end() :])]

    def _stream(self, text: str) -> list[Delta]:
        if self._arguments is None or self._arguments.is_done or not text:
            return []
        return [Arguments(self._index, text[: self._arguments.feed(text)])]

    def _finish(self) -> list[Delta]:
        """End an object, which may be cut off, or no call."""
        text, index = self._text, self._index
        self._object, self._arguments, self._text, self._index = None, None, "", -1
        return [] if index >= 0 or not text else self._late(text)

    def _late(self, text: str) -> list[Delta]:
        """A call whose name does not come first, or whose arguments are a string."""
        try:
            call = json.loads(text)
        except (RecursionError, ValueError):
            return [Content(text)]
        name = call.get("name")
        arguments = call.get("arguments", call.get("parameters"))
        if not isinstance(name, str) or arguments is None:
            return [Content(text)]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return self._numbers.whole(name, arguments)
