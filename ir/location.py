"""Locations in the user's source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Location:
    """A line of the user's source; `function` is the name of the function around it.

    The text form, printed on request, is `loc("train.py":12 in step)`.
    """

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}"
        return f"{where}, in {self.function}" if self.function else where
