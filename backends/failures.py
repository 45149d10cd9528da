"""Makes the plain-data description of an exception that an op of a program has raised."""

from __future__ import annotations

import linecache

from ..ir.module import Module, Program
from ..ir.ops import Call, Op
from ..ir.printer import format_op
from .errors import Failure, traceback_text, type_name


def failure_at(op: Op, program: Program, module: Module, error: BaseException) -> Failure:
    """What every rank is told of `error`, which `op` of a rank's program has raised."""
    actor, method = _method(op, module)
    source = linecache.getline(op.loc.file, op.loc.line).strip() if op.loc else ""
    return Failure(
        type_name=type_name(error),
        message=str(error),
        rank=program.rank or 0,
        op=format_op(op),
        actor=actor,
        method=method,
        location=op.loc,
        source=source,
        traceback=traceback_text(error),
    )


def _method(op: Op, module: Module) -> tuple[str | None, str | None]:
    if not isinstance(op, Call):
        return None, None
    function = module.functions[op.fn.name]
    if function.actor is None:
        return None, function.name
    return function.actor, function.name.removeprefix(f"{function.actor}.")
