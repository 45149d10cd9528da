"""Check that no gathered copy of a stored parameter is used once its actor may have changed.

A function with `parameter` reads a parameter at rest. Transfers, collectives and functions that
only hand it over make copies of it, with the value that it had at the read. A program over all
ranks is refused if it uses such a copy behind a call that may change the actor's parameters: a
single process would use the parameter's new value there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..attributes import Effect
from ..ops import Assemble, Call, Collective, Copy, Op, Recv, Send, Slice, Transfer, Value, Wait
from ..ops.module import Function, FunctionKind, Program
from ..text.diagnostics import Diagnostic

_HANDING = (Assemble, Collective, Copy, Slice, Transfer, Wait)
"""The ops whose results are copies of the same parameter as their operands."""


@dataclass(frozen=True)
class _ParameterCopy:
    """A copy of a stored parameter.

    Attributes:
        function: the function that read the parameter.
        version: the number of calls before the read that may have changed the actor's parameters.
        read: the call that read it.
    """

    function: Function
    version: int
    read: Op


def check_parameters(program: Program, functions: Mapping[str, Function]) -> Iterator[Diagnostic]:
    """The uses, in a program over all ranks, of copies of parameters that may be stale."""
    copies: dict[Value, _ParameterCopy] = {}
    sent: dict[tuple[int, int], _ParameterCopy] = {}
    changes: dict[str | None, tuple[int, Op]] = {}
    for op in program.ops:
        held = next((copies[value] for value in op.operands if value in copies), None)
        function = functions[op.fn.name] if isinstance(op, Call) else None
        if isinstance(op, Send) and held is not None:
            sent[op.chan, op.seq] = held
        elif isinstance(op, Recv) and (op.chan, op.seq) in sent:
            copies[op.result] = sent[op.chan, op.seq]
        elif isinstance(op, _HANDING) and held is not None:
            copies.update(dict.fromkeys(op.results, held))
        elif function is not None:
            if held is not None and _hands_over(function):
                copies.update(dict.fromkeys(op.results, held))
            elif held is not None:
                for value in op.operands:
                    if value in copies:
                        yield from _stale(copies[value], value, changes, op, program)
            elif function.parameter is not None and function.effect is Effect.READ:
                version = _version(function, changes)
                copies.update(dict.fromkeys(op.results, _ParameterCopy(function, version, op)))
            for state, effect in function.touches:
                if effect.changes_parameters:
                    changes[state] = changes.get(state, (0, op))[0] + 1, op


def _hands_over(function: Function) -> bool:
    return function.kind is FunctionKind.BUILTIN or function.parameter is not None


def _version(function: Function, changes: Mapping[str | None, tuple[int, Op]]) -> int:
    return sum(changes[state][0] for state, _ in function.touches if state in changes)


def _stale(
    copy: _ParameterCopy,
    value: Value,
    changes: Mapping[str | None, tuple[int, Op]],
    op: Op,
    program: Program,
) -> Iterator[Diagnostic]:
    if _version(copy.function, changes) == copy.version:
        return
    last = [changes[state][1] for state, _ in copy.function.touches if state in changes]
    yield Diagnostic(
        f"%{value.name} is a copy of '{copy.function.parameter}' of actor {copy.function.actor} "
        "from before a call that may have changed it",
        op,
        program,
        value,
        help="gather the parameter again behind that call",
        notes=(
            Diagnostic("it was read here", copy.read, program),
            Diagnostic("it may have changed here", last[-1], program),
        ),
    )
