"""Stop strings: where a text ends that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """Cuts a text at the first of several strings.

    The longest end of the text that could begin one of them is held back.

    Args:
        keeps: whether the text has the string that ends it.

    Attributes:
        hit: the string that has ended the text; empty before.
    """

    def __init__(self, strings: Sequence[str], keeps: bool = False) -> None:
        self._strings, self._keeps = strings, keeps
        self._held = ""
        self.hit = ""

    @property
    def is_hit(self) -> bool:
        return bool(self.hit)

    def step(self, text: str) -> str:
        """The text that can be shown; nothing more, once `is_hit`."""
        if not self._strings or self.is_hit:
            return "" if self.is_hit else text
        text = self._held + text
        hits = [(at, string) for string in self._strings if (at := text.find(string)) >= 0]
        if hits:
            at, self.hit = min(hits)
            self._held = ""
            return text[: at + len(self.hit) * self._keeps]
        longest = max(map(len, self._strings)) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if any(string.startswith(text[start:]) for string in self._strings):
                self._held = text[start:]
                return text[:start]
        self._held = ""
        return text

    def rest(self) -> str:
        """The text that is still held back, at the end."""
        text, self._held = self._held, ""
        return text
