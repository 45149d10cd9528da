"""Describe each instruction of a bound program: its op, its role, and what it reads and writes.

The plain list of instructions says nothing about itself, which makes it fast. After a failure, an
execution goes on by these descriptions (`driven/error_propagation.py`).
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from ...ir.ops.module import Function
from ..base import Port


class Role(enum.Enum):
    """The effect of an instruction, as far as errors are concerned.

    COMPUTE makes values of values. ISSUE starts a communication op with the value of its source,
    if it has one. AWAIT is done when a communication op is, and takes its value. KEEP is
    bookkeeping, which has to happen whatever the values are.
    """

    COMPUTE = "compute"
    ISSUE = "issue"
    AWAIT = "await"
    KEEP = "keep"


class InstructionInfo(NamedTuple):
    """The description of one instruction; a tuple, as thousands are made, and tuples are made fast.

    Attributes:
        role: what it does.
        sources: registers that it reads.
        targets: registers that it writes.
        port: what ISSUE starts, and AWAIT polls.
        function: what COMPUTE calls, if it is a call.
        reporter: the rank whose report AWAIT waits for, if it waits for a report and not for an op.
        op: index of its op in the program.
        awaited: the communication op whose completion it waits for, as an index into the program;
            None for one that never blocks.
        is_clear: True if it only empties a register.
    """

    role: Role
    sources: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()
    port: Port | None = None
    function: Function | None = None
    reporter: int | None = None
    op: int = 0
    awaited: int | None = None
    is_clear: bool = False


KEEP = InstructionInfo(Role.KEEP)
CLEAR = InstructionInfo(Role.KEEP, is_clear=True)
