"""Harmony, the format of gpt-oss: messages in channels, for thoughts, calls and answers."""

from __future__ import annotations

import re

from .calls import Numbers
from .deltas import Arguments, Content, Delta, Reasoning, Splitter
from .parsers import Schemas


class Harmony:
    """`<|channel|>analysis<|message|>…<|end|>` are thoughts, `final` is the answer, and

    `commentary to=functions.NAME` a call, whose message is its arguments. The first header's
    `<|start|>assistant` stands in the prompt.
    """

    START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
    CONSTRAIN, END = "<|constrain|>", "<|end|>"
    MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, "<|call|>", "<|return|>")
    _TOOL = re.compile(r"to=(?:functions\.)?([\w.-]+)")

    def __init__(self, schemas: Schemas) -> None:
        self._splitter, self._numbers = Splitter(self.MARKS), Numbers()
        self._header = ""
        self._is_body = False
        self._index = -1  # of the call that the message is for

    def feed(self, text: str, is_end: bool) -> list[Delta]:
        deltas: list[Delta] = []
        for piece, marker in self._splitter.feed(text, is_end):
            if self._is_body:
                deltas += self._body(piece)
            else:
                self._header += piece
            if marker == self.MESSAGE:
                deltas += self._begin()
            elif marker in (self.CHANNEL, self.CONSTRAIN) and not self._is_body:
                self._header += marker
            elif marker:
                self._header, self._is_body, self._index = "", False, -1
        if is_end and not self._is_body and self.CHANNEL not in self._header and self._header:
            header = self._header.strip()
            self._header = ""
            deltas += [] if header in ("", "assistant") else [Content(header)]
        return deltas

    def _begin(self) -> list[Delta]:
        self._is_body = True
        tool = self._TOOL.search(self._header)
        if tool is None:
            return []
        begin = self._numbers.begin(tool[1])
        self._index = begin.index
        return [begin]

    def _body(self, text: str) -> list[Delta]:
        if not text:
            return []
        if self._index >= 0:
            return [Arguments(self._index, text)]
        _, _, channel = self._header.partition(self.CHANNEL)
        return [Reasoning(text) if channel.strip().startswith("analysis") else Content(text)]
