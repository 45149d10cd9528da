"""Read programs as they are printed: an op on each line.

Ops have many attributes, types and locations in common. The text behind the operands is read once
for all lines in which it is the same, so most ops take a few lookups, and half the time of their
tokens. Programs that are written in another way, or malformed, are left to the tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..location import Location
from ..ops import Op, Value
from ..ops.module import Program
from ..types import Type
from .literals import parse_location

_RESULTS = re.compile(r"%[\w.$-]+(?:, %[\w.$-]+)*+")
_PROGRAM = re.compile(r"^ *+program @", re.MULTILINE)

Attributes = Callable[[str, str], tuple[type[Op], dict[str, Any]]]
"""Reads the class and the attributes of ops from an opcode and the text between braces."""

Types = Callable[[str], Sequence[Type]]
"""Reads the types of an op's results."""


class NotPrinted(Exception):
    """A text is not one that the printer writes."""


def split_module(text: str) -> tuple[str, str]:
    """The text of a module up to its programs, and the text of these.

    Raises:
        NotPrinted: no program stands in it as it is printed.
    """
    first = _PROGRAM.search(text)
    whole = text.rstrip()
    if first is None or not whole.endswith("\n}"):
        raise NotPrinted
    return text[: first.start()], whole[first.start() : -2]


def split_programs(text: str) -> Iterator[tuple[str, list[str]]]:
    """The first line of each program, and the lines of its ops.

    Raises:
        NotPrinted: there are comments, names in quotes, or other lines.
    """
    if "//" in text or '%"' in text:
        raise NotPrinted
    lines = [line.strip() for line in text.rstrip().split("\n")]
    ends = [number for number, line in enumerate(lines) if line == "}"]
    start = 0
    for end in ends:
        yield lines[start], lines[start + 1 : end]
        start = end + 1
    if start != len(lines):
        raise NotPrinted


@dataclass(frozen=True, slots=True)
class _OpEnding:
    """The class of an op, and the parts of its text behind the operands."""

    cls: type[Op]
    attributes: dict[str, Any]
    types: Sequence[Type]
    location: Location | None


class PrintedOps:
    """Reads the ops of the programs of one module.

    Args:
        attributes, types: read a part of an op's text, and fail unless they have read all of it.
    """

    def __init__(self, attributes: Attributes, types: Types) -> None:
        self._read_attributes = attributes
        self._read_types = types
        self._endings: dict[tuple[str, str], _OpEnding] = {}
        self._attributes: dict[tuple[str, str], tuple[type[Op], dict[str, Any]]] = {}
        self._types: dict[str, Sequence[Type]] = {"": ()}
        self._locations: dict[str, Location | None] = {"": None}

    def read(self, lines: Iterable[str], program: Program) -> None:
        """Read lines into a program, whose parameters are there.

        Raises:
            NotPrinted: a line is not an op as it is printed.
            IRError, ValueError: a part of a line is malformed.
        """
        values = {f"%{value.name}": value for value in program.params}
        for line in lines:
            head, closing, behind = line.partition(")")
            left, opening, operands = head.partition("(")
            if not opening or not closing:
                raise NotPrinted
            names, _, opcode = left.rpartition(" = ")
            ending = self._endings.get((opcode, behind))
            if ending is None:
                ending = self._endings[opcode, behind] = self._ending(opcode, behind)
            try:
                used = tuple([values[name] for name in operands.split(", ")]) if operands else ()
            except KeyError:
                raise NotPrinted from None
            results = _define(names, ending.types, values)
            program.ops.append(ending.cls(used, results, loc=ending.location, **ending.attributes))

    def _ending(self, opcode: str, text: str) -> _OpEnding:
        before, loc, line = text.rpartition(" loc(")
        attributes, _, types = (before if loc else text).partition(" : ")
        location = f"loc({line}" if loc else ""
        key = opcode, attributes
        if key not in self._attributes:
            self._attributes[key] = self._read_attributes(*key)
        if types not in self._types:
            self._types[types] = self._read_types(types)
        if location not in self._locations:
            self._locations[location] = parse_location(location)
        return _OpEnding(*self._attributes[key], self._types[types], self._locations[location])


def _define(names: str, types: Sequence[Type], values: dict[str, Value]) -> tuple[Value, ...]:
    """The results of an op, which are values from now on."""
    if not names and not types:
        return ()
    defined = names.split(", ")
    if len(types) != len(defined) or _RESULTS.fullmatch(names) is None:
        raise NotPrinted
    results = tuple([Value(name[1:], type_) for name, type_ in zip(defined, types, strict=True)])
    before = len(values)
    values.update(zip(defined, results, strict=True))
    if len(values) != before + len(defined):
        raise NotPrinted  # a name is not new
    return results
