"""Formats in which models write calls, by their names; texts of others are content."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

from .calls import JsonCalls, Numbers
from .deltas import Arguments, Content, Delta, JsonValue, Splitter

Schemas = Mapping[str, Mapping[str, Any]]
"""The parameters of each tool, by its name."""


class Text:
    """Text around calls. Whitespace ahead of a call, or behind one, is no content."""

    def __init__(self) -> None:
        self._space = ""

    def feed(self, text: str) -> list[Delta]:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return [Content(kept)] if kept else []

    def drop(self) -> None:
        """Forget whitespace, for a call comes."""
        self._space = ""

    def rest(self) -> list[Delta]:
        space, self._space = self._space, ""
        return [Content(space)] if space else []


class Hermes:
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`, once for each call.

    Hermes, Qwen 2.5 and 3, and many others.
    """

    BEGIN, END = "<tool_call>", "</tool_call>"

    def __init__(self, schemas: Schemas) -> None:
        self._splitter, self._text = Splitter((self.BEGIN, self.END)), Text()
        self._numbers = Numbers()
        self._calls: JsonCalls | None = None

    def feed(self, text: str, is_end: bool) -> list[Delta]:
        deltas: list[Delta] = []
        for piece, marker in self._splitter.feed(text, is_end):
            deltas += self._text.feed(piece) if self._calls is None else self._calls.feed(piece)
            if marker and self._calls is not None:
                deltas += self._calls.close()
                self._calls = None
            if marker == self.BEGIN:
                self._text.drop()
                self._calls = JsonCalls(self._numbers)
        if is_end:
            deltas += [] if self._calls is None else self._calls.close()
            deltas += [] if self._numbers.begun else self._text.rest()
        return deltas


class QwenCoder:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`.

    Qwen3-Coder. Values are plain text, and become JSON as the tool's schema says.
    """

    _FUNCTION = re.compile(r"<function=([^>]*)>(.*)", re.DOTALL)
    _PARAMETER = re.compile(r"<parameter=([^>]*)>\n?(.*?)\n?</parameter>", re.DOTALL)

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._splitter, self._text = Splitter((Hermes.BEGIN, Hermes.END)), Text()
        self._numbers = Numbers()
        self._body: str | None = None

    def feed(self, text: str, is_end: bool) -> list[Delta]:
        deltas: list[Delta] = []
        for piece, marker in self._splitter.feed(text, is_end):
            if self._body is None:
                deltas += self._text.feed(piece)
            else:
                self._body += piece
            if marker:
                deltas += self._call()
            if marker == Hermes.BEGIN:
                self._text.drop()
                self._body = ""
        if is_end:
            deltas += self._call()
            deltas += [] if self._numbers.begun else self._text.rest()
        return deltas

    def _call(self) -> list[Delta]:
        body, self._body = self._body, None
        if body is None:
            return []
        function = self._FUNCTION.search(body)
        if function is None:
            return [Content(body)] if body.strip() else []
        name = function[1].strip()
        known = self._schemas.get(name, {}).get("properties", {})
        arguments = {
            key.strip(): _value(value, known.get(key.strip()))
            for key, value in self._PARAMETER.findall(function[2])
        }
        return self._numbers.whole(name, json.dumps(arguments, ensure_ascii=False))


def _value(text: str, schema: object) -> Any:
    """A value of plain text: a string where the schema takes one, else what JSON makes of it."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if kinds == "string" or (isinstance(kinds, list) and "string" in kinds and text != "null"):
        return text
    try:
        return json.loads(text)
    except (RecursionError, ValueError):
        return text


class Llama:
    """`{"name": …, "parameters": …}` alone, with `<|python_tag|>` in front or not. Llama 3."""

    TAG = "<|python_tag|>"

    def __init__(self, schemas: Schemas) -> None:
        self._calls, self._held = JsonCalls(Numbers()), ""
        self._is_call: bool | None = None

    def feed(self, text: str, is_end: bool) -> list[Delta]:
        if self._is_call is None:
            self._held += text
            text = self._held.lstrip()
            may_be_tag = self.TAG.startswith(text[: len(self.TAG)])
            if may_be_tag and len(text) < len(self.TAG) and not is_end:
                return []
            has_tag = text.startswith(self.TAG)
            self._is_call = has_tag or text.startswith("{")
            text = text.removeprefix(self.TAG) if self._is_call else self._held
        if not self._is_call:
            return [Content(text)] if text else []
        return self._calls.feed(text) + (self._calls.close() if is_end else [])


class Mistral:
    """`[TOOL_CALLS]` with a list of calls as JSON, or with a name, `[ARGS]` and arguments."""

    BEGIN, ARGS = "[TOOL_CALLS]", "[ARGS]"

    def __init__(self, schemas: Schemas) -> None:
        self._splitter, self._text = Splitter((self.BEGIN, self.ARGS)), Text()
        # Templates take identifiers of nine letters alone.
        self._numbers = Numbers(lambda: secrets.token_hex(5)[:9])
        self._calls: JsonCalls | NamedCall | None = None
        self._is_open = False  # behind the marker

    def feed(self, text: str, is_end: bool) -> list[Delta]:
        deltas: list[Delta] = []
        for piece, marker in self._splitter.feed(text, is_end):
            deltas += self._take(piece)
            if marker == self.BEGIN:
                deltas += self._close()
                self._text.drop()
                self._is_open = True
        if is_end:
            deltas += self._close()
            deltas += [] if self._numbers.begun else self._text.rest()
        return deltas

    def _take(self, piece: str) -> list[Delta]:
        if not self._is_open:
            return self._text.feed(piece)
        if self._calls is None and (text := piece.lstrip()):
            is_json = text[0] in "[{"
            self._calls = JsonCalls(self._numbers) if is_json else NamedCall(self._numbers)
        return [] if self._calls is None else self._calls.feed(piece)

    def _close(self) -> list[Delta]:
        calls, self._calls = self._calls, None
        return [] if calls is None else calls.close()


class NamedCall:
    """A name, whatever stands between, and the arguments as an object of JSON."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers, self._head, self._index = numbers, "", -1
        self._arguments = JsonValue()
        self._kind = ""

    def separate(self, kind: str) -> None:
        """Take the text so far for a kind of calls, and no name, if it is that kind."""
        if self._index < 0 and self._head.strip() == kind:
            self._head, self._kind = "", kind

    def feed(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        if self._index < 0:
            self._head += text
            name, brace, rest = self._head.partition("{")
            if not brace:
                return []
            begin = self._numbers.begin(name.strip().split("\n")[0].strip() or self._kind)
            self._index, text = begin.index, brace + rest
            deltas.append(begin)
        if text and not self._arguments.is_done:
            deltas.append(Arguments(self._index, text[: self._arguments.feed(text)]))
        return deltas

    def close(self) -> list[Delta]:
        """A name without arguments is no call."""
        return [Content(self._head)] if self._index < 0 and self._head.strip() else []


def _deepseek(words: str) -> str:
    """A token of DeepSeek's, which has a wide bar, and a block where words have a space."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


class DeepSeek:
    """Calls between tokens of DeepSeek V3, R1 and V3.1.

    Behind the token that begins a call either its name, a separator and the arguments follow, or
    the word `function`, a separator, its name, and the arguments in a fence.
    """

    CALLS, ENDS = _deepseek("tool calls begin"), _deepseek("tool calls end")
    BEGIN, END = _deepseek("tool call begin"), _deepseek("tool call end")
    SEPARATOR = _deepseek("tool sep")

    def __init__(self, schemas: Schemas) -> None:
        marks = (self.CALLS, self.BEGIN, self.SEPARATOR, self.END, self.ENDS)
        self._splitter, self._text, self._numbers = Splitter(marks), Text(), Numbers()
        self._call: NamedCall | None = None
        self._is_open = False

    def feed(self, text: str, is_end: bool) -> list[Delta]:
        deltas: list[Delta] = []
        for piece, marker in self._splitter.feed(text, is_end):
            if self._call is not None:
                deltas += self._call.feed(piece)
            elif not self._is_open:
                deltas += self._text.feed(piece)
            if marker == self.SEPARATOR and self._call is not None:
                self._call.separate("function")
            if marker in (self.END, self.ENDS, self.BEGIN):
                deltas += self._close()
            if marker in (self.CALLS, self.BEGIN):
                self._text.drop()
                self._is_open = True
            if marker == self.BEGIN:
                self._call = NamedCall(self._numbers)
            elif marker == self.ENDS:
                self._is_open = False
        if is_end:
            deltas += self._close()
            deltas += [] if self._numbers.begun else self._text.rest()
        return deltas

    def _close(self) -> list[Delta]:
        call, self._call = self._call, None
        return [] if call is None else call.close()


class JsonList:
    """A list of calls as JSON and nothing else, as a grammar makes any model write it."""

    def __init__(self, schemas: Schemas) -> None:
        self._calls = JsonCalls(Numbers())

    def feed(self, text: str, is_end: bool) -> list[Delta]:
        return self._calls.feed(text) + (self._calls.close() if is_end else [])
