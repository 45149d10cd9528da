"""Check tensors that are assembled in place: each buffer is written once, and never read."""

from __future__ import annotations

from collections.abc import Iterator

from ..ops import Assemble, Copy, Free, Op, Recv, Reserve, Value, Wait
from ..ops.module import Program
from ..text.diagnostics import Diagnostic

_HELP = (
    "one recv or copy writes each buffer of a reserve; one assemble takes the whole, and behind it "
    "what has been written to the buffers, in their order; nothing else uses any of them"
)


def check_reserves(program: Program) -> Iterator[Diagnostic]:
    """The problems with the storage that a rank's program reserves for tensors assembled in place.

    A whole and its buffers share memory. They count as separate storages, since only the assemble
    reads them.
    """
    wholes: dict[Value, Reserve] = {}
    empty: dict[Value, Value] = {}
    filled: dict[Value, Value] = {}
    assembled: set[Value] = set()
    for op in program.ops:
        message = None
        if isinstance(op, Reserve):
            if op.results:
                wholes[op.results[0]] = op
                empty.update((buffer, buffer) for buffer in op.results[1:])
        elif not empty or not op.operands or isinstance(op, Free):
            continue
        elif isinstance(op, Wait):
            for known in (empty, filled):
                if (buffer := known.get(op.operands[0])) is not None:
                    known.update(dict.fromkeys(op.results, buffer))
            message = _misused(op, wholes)
        elif isinstance(op, Assemble) and op.is_in_place:
            message = _assembled(op, wholes, filled)
            if op.operands[0] in assembled:
                message = f"%{op.operands[0].name} is assembled a second time"
            assembled.add(op.operands[0])
        else:
            into = op.shared_operand if isinstance(op, Recv | Copy) else None
            buffer = None if into is None else empty.get(into)
            if buffer is None:
                message = _misused(op, wholes, empty, filled)
            else:
                message = _misused(op, wholes, filled)
                if isinstance(op, Copy) and op.operands[0] in empty:
                    message = f"{op.opcode} takes %{op.operands[0].name}, which nothing has written"
                if buffer in filled.values():
                    message = f"%{buffer.name} is written a second time"
                filled.update(dict.fromkeys(op.results, buffer))
        if message is not None:
            yield Diagnostic(message, op, program, help=_HELP)
    for whole, reserve in wholes.items():
        if whole not in assembled:
            yield Diagnostic(f"%{whole.name} is never assembled", reserve, program, whole, _HELP)


def _assembled(
    op: Assemble, wholes: dict[Value, Reserve], filled: dict[Value, Value]
) -> str | None:
    """The problem with an assemble in place, if any."""
    storage = op.operands[0]
    reserve = wholes.get(storage)
    if reserve is None:
        return f"%{storage.name} is not the whole of a reserve"
    if op.regions != reserve.regions:
        return f"%{storage.name} is assembled of other regions than it was reserved in"
    buffers = [filled.get(value) for value in op.parts]
    for value, buffer, expected in zip(op.parts, buffers, reserve.results[1:], strict=False):
        if buffer is not expected:
            return f"%{value.name} is not what was written to %{expected.name}"
    return None


def _misused(op: Op, *tables: dict[Value, Reserve] | dict[Value, Value]) -> str | None:
    """The problem, if any, that an op takes storage that only other ops may take."""
    for value in op.operands:
        if any(value in table for table in tables):
            return f"{op.opcode} takes %{value.name}, which is storage of a tensor to assemble"
    return None
