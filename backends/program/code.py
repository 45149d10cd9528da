"""A bound program: instructions, their descriptions, and the registers that they work on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .instruction_info import KEEP, InstructionInfo
from .instructions import Instruction, Registers
from .ticket_locks import Tickets


@dataclass(slots=True)
class Code:
    """A program, bound.

    Attributes:
        instructions: what to call, in order.
        infos: the description of each instruction.
        registers: the list that the instructions work on.
        template: what the registers hold before the inputs are written.
        outputs: registers that the program returns.
        progress: functions that move on what the program has begun, called while it waits.
        tickets: taken anew for each execution; None if one is in flight at a time.
        execution: number of the execution in progress, or of the last one; -1 before the first.
    """

    instructions: list[Instruction] = field(default_factory=list)
    infos: list[InstructionInfo] = field(default_factory=list)
    registers: Registers = field(default_factory=list)
    template: Registers = field(default_factory=list)
    outputs: tuple[int, ...] = ()
    progress: list[Callable[[], object]] = field(default_factory=list)
    tickets: Tickets | None = None
    execution: int = -1

    def put_first(self, front: Sequence[Instruction]) -> None:
        """Put instructions of bookkeeping ahead of all others."""
        self.instructions[:0] = front
        self.infos[:0] = [KEEP] * len(front)

    def insert(self, at: int | None, instruction: Instruction, info: InstructionInfo) -> None:
        """Insert an instruction at an index; behind all others if that is None."""
        index = len(self.instructions) if at is None else at
        self.instructions.insert(index, instruction)
        self.infos.insert(index, info)

    def reorder(self, order: Sequence[int]) -> None:
        """Keep the instructions with these indices, in this order."""
        self.instructions[:] = [self.instructions[i] for i in order]
        self.infos[:] = [self.infos[i] for i in order]
