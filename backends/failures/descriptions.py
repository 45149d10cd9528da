"""Describe an exception that an op of a program has raised, as plain data."""

from __future__ import annotations

import linecache
from collections.abc import Mapping

from ...ir.location import Location
from ...ir.ops import Call, Op
from ...ir.ops.module import Module, Program
from ...ir.text.printer import format_op
from ..base import Body, GraphBody
from ..errors import Failure, message_text, traceback_text, type_name
from .flight import method_of


def failure_at(
    op: Op,
    program: Program,
    module: Module,
    error: BaseException,
    bodies: Mapping[str, Body] | None = None,
) -> Failure:
    """The description of `error`, which `op` of a rank's program has raised, for all ranks."""
    actor, method = _method(op, module)
    source = linecache.getline(op.loc.file, op.loc.line).strip() if op.loc else ""
    return Failure(
        type_name=type_name(error),
        message=message_text(error),
        rank=program.rank or 0,
        op=format_op(op),
        actor=actor,
        method=method,
        location=op.loc,
        source=source,
        traceback=traceback_text(error),
        raised=_raised(op, module, error, bodies or {}),
    )


def note_departure(error: BaseException, failure: Failure) -> None:
    """Note on an exception for the whole process which method it has come out of.

    Nobody makes a `RemoteError` of it, so the note is all that its readers are told.
    """
    called = "" if failure.location is None else f", called from {failure.location}"
    note = f"{failure.where}{called}"
    if note not in getattr(error, "__notes__", ()):  # a method may raise one twice
        error.add_note(note)


def _raised(
    op: Op, module: Module, error: BaseException, bodies: Mapping[str, Body]
) -> Location | None:
    body = bodies.get(module.functions[op.fn.name].body_name) if isinstance(op, Call) else None
    return body.locate(error.__traceback__) if isinstance(body, GraphBody) else None


def _method(op: Op, module: Module) -> tuple[str | None, str | None]:
    return method_of(op, module) if isinstance(op, Call) else (None, None)
