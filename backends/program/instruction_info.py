"""What each instruction of a bound program reads, writes and starts, for those who must know.

The plain list of instructions says nothing about itself, which makes it fast. An execution in which
something has failed goes on by these descriptions instead (`careful.py`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ...ir.module import Function
from ..base import Port


class Role(enum.Enum):
    """What an instruction does, as far as errors are concerned.

    COMPUTE makes values of values. ISSUE starts a communication op with the value of its source,
    if it has one. AWAIT is done when a communication op is, and takes its value. KEEP is
    bookkeeping, which has to happen whatever the values are.
    """

    COMPUTE = "compute"
    ISSUE = "issue"
    AWAIT = "await"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction.

    Attributes:
        role: what it does.
        sources: registers that it reads.
        targets: registers that it writes.
        port: what ISSUE starts, and AWAIT polls.
        function: what COMPUTE calls, if it is a call.
        reporter: the rank whose report AWAIT waits for, if it is no op of the program.
    """

    role: Role
    sources: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()
    port: Port | None = None
    function: Function | None = None
    reporter: int | None = None


KEEP = Step(Role.KEEP)
