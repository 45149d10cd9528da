"""Errors about IR: they say what is wrong, where in the IR and the user's file, and what to do."""

from __future__ import annotations

import linecache
from dataclasses import dataclass

from ..location import Location
from ..ops import Op, Value
from ..ops.module import Program
from .printer import format_op, format_value

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A part of a line of text; `line` and `column` count from 1, and `text` is the whole line."""

    file: str
    line: int
    column: int
    length: int
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Diagnostic:
    """One error.

    Attributes:
        message: what is wrong, in a sentence without a full stop.
        op: the op to show, with the user's line that it comes from.
        program: the program of `op`; its name and the op before `op` are shown.
        value: the value to underline in `op`; None: all of the op.
        help: what to do about it.
        span: the part of a text to show, for errors in a text.
        loc: the user's line, if there is no op that has it.
        notes: further places that are part of the error.
    """

    message: str
    op: Op | None = None
    program: Program | None = None
    value: Value | None = None
    help: str = ""
    span: TextSpan | None = None
    loc: Location | None = None
    notes: tuple[Diagnostic, ...] = ()

    def render(self, kind: str = "error") -> str:
        """The text that a user sees, on several lines."""
        where = f"{self.span.file}:{self.span.line}:{self.span.column}: " if self.span else ""
        lines = [f"{where}{kind}: {self.message}"]
        if self.span is not None:
            lines += _draw_span(self.span)
        if self.op is not None:
            lines += _draw_op(self.op, self.program, self.value)
        elif self.program is not None:
            lines.append(f"  in {_title(self.program)}")
        loc = self.loc or (self.op.loc if self.op is not None else None)
        if loc is not None:
            lines += _draw_location(loc)
        for note in self.notes:
            lines += ["  " + line for line in note.render("note").splitlines()]
        if self.help:
            lines.append(f"  help: {self.help}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.render()


class IRError(Exception):
    """IR is wrong, or a pass cannot compile it.

    Attributes:
        diagnostics: the errors, one or more.
    """

    __module__ = "cg"  # the public name, which tracebacks show

    def __init__(self, *diagnostics: Diagnostic) -> None:
        super().__init__(*diagnostics)
        self.diagnostics = diagnostics

    def __str__(self) -> str:
        shown = [diagnostic.render() for diagnostic in self.diagnostics[:_SHOWN]]
        if more := len(self.diagnostics) - len(shown):
            shown.append(f"... and {more} more errors")
        return "\n".join(shown)


def error(
    message: str,
    *,
    op: Op | None = None,
    program: Program | None = None,
    value: Value | None = None,
    help: str = "",
    notes: tuple[Diagnostic, ...] = (),
) -> IRError:
    """An `IRError` with one diagnostic, to be raised."""
    return IRError(Diagnostic(message, op, program, value, help, notes=notes))


def _title(program: Program) -> str:
    return f"program @{program.name if program.rank is None else program.rank}"


def _draw_op(op: Op, program: Program | None, value: Value | None) -> list[str]:
    text = format_op(op)
    lines = []
    if program is not None:
        lines.append(f"  in {_title(program)}:")
        index = next((i for i, candidate in enumerate(program.ops) if candidate is op), 0)
        if index > 0:
            lines.append(f"    {format_op(program.ops[index - 1])}")
    start, length = _find(text, op, value)
    return [*lines, f"    {text}", f"    {' ' * start}{'^' * length}"]


def _find(text: str, op: Op, value: Value | None) -> tuple[int, int]:
    """The position and length of `value` in the text of `op`; of the whole text if it is absent."""
    if value is not None:
        name = format_value(value)
        start = text.index("(") if value in op.operands and value not in op.results else 0
        for end in (",", ")", " ="):
            if (at := text.find(name + end, start)) >= 0:
                return at, len(name)
    return 0, len(text)


def _draw_span(span: TextSpan) -> list[str]:
    number = str(span.line)
    gutter = " " * len(number)
    return [
        f"  {number} | {span.text}",
        f"  {gutter} | {' ' * (span.column - 1)}{'^' * max(span.length, 1)}",
    ]


def _draw_location(loc: Location) -> list[str]:
    source = linecache.getline(loc.file, loc.line).strip()
    if not source:
        return [f"  written at {loc}"]
    return [f"  written at {loc}:", f"    {source}"]
