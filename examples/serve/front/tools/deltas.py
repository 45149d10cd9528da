"""Pieces of an answer as they come: text, thoughts, and calls of tools; and scanners of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of a thought ahead of the answer."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """The beginning of a call: which tool is called."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of the JSON of a call's arguments."""

    index: int
    text: str


Delta = Content | Reasoning | CallBegin | Arguments


class OutputParser(Protocol):
    """Takes the text of a model in pieces, and gives deltas."""

    def feed(self, text: str, is_end: bool) -> list[Delta]:
        """The deltas that are certain with this piece; at the end, all that are left."""
        ...


class Plain:
    """A parser of texts in which nothing is special."""

    def feed(self, text: str, is_end: bool) -> list[Delta]:
        return [Content(text)] if text else []


class Splitter:
    """Cuts a text at markers, and holds back what may become one.

    Args:
        markers: strings, none of which begins another.
    """

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers, self._held = markers, ""

    def feed(self, text: str, is_end: bool) -> list[tuple[str, str]]:
        """Pairs of a text and the marker behind it, which is empty where none is yet."""
        text, pairs = self._held + text, []
        while True:
            at, marker = min(
                (
                    (place, candidate)
                    for candidate in self._markers
                    if (place := text.find(candidate)) >= 0
                ),
                default=(-1, ""),
            )
            if at < 0:
                break
            pairs.append((text[:at], marker))
            text = text[at + len(marker) :]
        cut = len(text) if is_end else len(text) - beginning(text, self._markers)
        self._held = text[cut:]
        if cut:
            pairs.append((text[:cut], ""))
        return pairs

    def rest(self) -> str:
        """The text that is held back, which then is no longer."""
        held, self._held = self._held, ""
        return held


def beginning(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of a text could begin a marker."""
    longest = max(map(len, markers), default=1) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return len(text) - start
    return 0


class JsonValue:
    """Finds the end of an object or a list of JSON."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = self._is_escaped = False
        self.is_done = False

    def feed(self, text: str) -> int:
        """How many characters of a text belong to the value, which may go on behind it."""
        for place, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_escaped = character == "\\"
                self._is_string = character != '"'
            elif character == '"':
                self._is_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.is_done = True
                    return place + 1
        return len(text)
