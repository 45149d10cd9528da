"""From lines of generated code to the user's lines."""

from __future__ import annotations

import linecache
from types import CodeType, TracebackType

from ....ir.location import Location


def show(file: str, text: str) -> None:
    """Let tracebacks show the lines of a source; `file` is its name in them."""
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)


class Locator:
    """Maps lines of generated code to the user's lines; called with a traceback."""

    def __init__(self, code: CodeType, locations: dict[int, Location]) -> None:
        self._locations = [(code, locations)]

    def add(self, code: CodeType, locations: dict[int, Location]) -> None:
        """Add the lines of further code."""
        self._locations.append((code, locations))

    def __call__(self, tb: TracebackType | None) -> Location | None:
        location = None
        while tb is not None:
            for code, locations in self._locations:
                if tb.tb_frame.f_code is code:
                    location = locations.get(tb.tb_lineno, location)
            tb = tb.tb_next
        return location
