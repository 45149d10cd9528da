"""Thoughts ahead of an answer, between `<think>` and `</think>`."""

from __future__ import annotations

from .deltas import Delta, OutputParser, Reasoning, Splitter

BEGIN, END = "<think>", "</think>"


class Think:
    """Takes a thought off the beginning of a text; another parser takes the rest.

    Args:
        rest: the parser of what follows.
        is_open: whether the prompt has begun the thought.
    """

    def __init__(self, rest: OutputParser, is_open: bool) -> None:
        self._rest = rest
        self._held = ""
        self._splitter = Splitter((END,))
        self._state = "thought" if is_open else "beginning"

    def feed(self, text: str, is_end: bool) -> list[Delta]:
        if self._state == "beginning":
            self._held += text
            text = self._held.lstrip()
            if BEGIN.startswith(text[: len(BEGIN)]) and len(text) < len(BEGIN) and not is_end:
                return []
            if text.startswith(BEGIN):
                self._state, text = "thought", text.removeprefix(BEGIN)
            else:
                self._state, text = "rest", self._held
        deltas: list[Delta] = []
        if self._state == "thought":
            pairs, text = self._splitter.feed(text, is_end), ""
            for place, (piece, marker) in enumerate(pairs):
                deltas += [Reasoning(piece)] if piece else []
                if marker:
                    self._state = "space"
                    text = "".join(map("".join, pairs[place + 1 :])) + self._splitter.rest()
                    break
        if self._state == "space" and (text := text.lstrip()):
            self._state = "rest"
        if self._state == "rest":
            deltas += self._rest.feed(text, is_end)
        elif is_end:
            deltas += self._rest.feed("", is_end)
        return deltas
