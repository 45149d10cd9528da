"""Arrange a bound program for executions in flight: inputs go out first, reports come last."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ...ir.ops import Send
from ...ir.ops.module import Program
from ..base import Port
from ..program.code import Code
from ..program.instruction_info import InstructionInfo, Role


@dataclass(frozen=True, slots=True)
class Reports:
    """Ports by which ranks report success or failure, beside their programs' own messages.

    Ranks whose failures never propagate to the driver report their end to it. In a program that
    only devices run, each rank tells all others, ahead of the work, whether it can do its part.

    Attributes:
        send: where to send the rank's report.
        receive: where the report of each other rank comes in.
    """

    send: tuple[Port, ...] = ()
    receive: tuple[tuple[int, Port], ...] = ()


def leave_out_clears(code: Code) -> None:
    """Drop the instructions at the very end that clear registers: all are cleared then."""
    count = len(code.infos)
    while count and code.infos[count - 1].is_clear:
        count -= 1
    code.reorder(range(count))


def send_inputs_first(code: Code, program: Program) -> None:
    """Send inputs before any receive is posted, so that ranks that wait for them can start.

    Sends keep their order, and so do all other instructions.
    """
    first = []
    for index, info in enumerate(code.infos):
        if info.role is Role.ISSUE and info.sources:
            sends = isinstance(program.ops[info.op], Send)
            if not sends or info.sources[0] >= len(program.params):
                break  # what comes later must not overtake it
            first.append(index)
    code.reorder([*first, *(i for i in range(len(code.infos)) if i not in set(first))])


def await_reports(code: Code, program: Program, reports: Reports) -> None:
    """Post the receives of reports first of all, and await them last."""
    last = last_op(program)
    for rank, port in reports.receive:
        info = InstructionInfo(Role.AWAIT, port=port, reporter=rank, op=last)
        code.insert(None, partial(take_report, port), info)
    post_reports(code, reports)


def post_reports(code: Code, reports: Reports) -> None:
    """Post the receives of reports first of all."""
    for _, port in reports.receive:
        code.insert(0, partial(_start, port), InstructionInfo(Role.ISSUE, port=port))


def last_op(program: Program) -> int:
    """Index of the op that instructions behind all others belong to."""
    return max(len(program.ops) - 1, 0)


def _start(port: Port) -> bool:
    port.start(None)
    return True


def take_report(port: Port) -> bool:
    """Wait for a report; raises the error if it is one."""
    if not port.poll():
        return False
    port.take()
    port.release()
    return True
