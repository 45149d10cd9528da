"""Record the times of instructions of bound programs, for profiles.

A program that is not recorded runs its own instructions; nothing in it knows of this file. A
recorded program runs other instructions, each of which calls one of the program's between two looks
at the clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Protocol

import torch

from ...ir.ops.module import Module, Program
from .code import Code
from .instruction_info import Role
from .instructions import Instruction

Range = Callable[[str], AbstractContextManager[object]]
"""Marks what runs inside it for a profiler of the device."""


@dataclass(frozen=True, slots=True)
class InstructionOrigin:
    """The origin of an instruction.

    Attributes:
        op: index of its op in the program.
        role: what it does.
        awaited: the communication op whose completion it waits for, as an index, if it does.
    """

    op: int
    role: Role
    awaited: int | None


@dataclass(slots=True)
class Budget:
    """The number of instructions that this process may still record."""

    left: int


class ProgramLog(Protocol):
    """Records the instructions of a bound program."""

    def wrap(self, code: Code) -> list[Instruction]:
        """The instructions of `code`, each wrapped so that it is recorded."""


class Recordable(Protocol):
    """A bound program that can be recorded: an `Executable` or an `Instance`."""

    program: Program
    module: Module

    def record(self, log: ProgramLog | None) -> None:
        """Record every instruction from the next execution on; with None, stop recording."""


class InstructionLog:
    """A `ProgramLog` with the times of each instruction of one bound program.

    Args:
        program: the program.
        budget: counts down with every instruction; at 0 the rest is only counted.
        ranges: see `device_ranges`; None for none.

    Attributes:
        origins: the origin of each instruction, in the order in which they run.
        events: four numbers for each time that an instruction has run: its index, the execution,
            and when it began and ended, in nanoseconds of `time.perf_counter_ns`. An instruction
            that waits begins when it is first tried.
        left_out: how many runs of instructions the budget had no room for.
    """

    def __init__(self, program: Program, budget: Budget, ranges: Range | None = None) -> None:
        self.program = program
        self.origins: tuple[InstructionOrigin, ...] = ()
        self.events = array("q")
        self.left_out = 0
        self._budget = budget
        self._ranges = ranges

    def wrap(self, code: Code) -> list[Instruction]:
        """The instructions of `code`, each wrapped so that it is recorded."""
        self.origins = tuple(
            InstructionOrigin(info.op, info.role, info.awaited) for info in code.infos
        )
        return [
            self._timed(index, self._marked(index, instruction), code)
            for index, instruction in enumerate(code.instructions)
        ]

    def _timed(self, index: int, instruction: Instruction, code: Code) -> Instruction:
        keep, clock = self._keep, perf_counter_ns
        number, began = -1, 0

        def run() -> bool:
            nonlocal number, began
            now = code.execution
            if now != number:  # the first try in this execution
                number, began = now, clock()
            try:
                if not instruction():
                    return False
            except BaseException:
                keep(index, now, began, clock())
                raise
            keep(index, now, began, clock())
            return True

        return run

    def _marked(self, index: int, instruction: Instruction) -> Instruction:
        ranges = self._ranges
        if ranges is None:
            return instruction
        op = self.program.ops[self.origins[index].op]
        name = getattr(op, "fn", op.opcode)
        text = str(name) if op.task is None else f"{op.task} {name}"

        def run() -> bool:
            with ranges(text):
                return instruction()

        return run

    def _keep(self, index: int, execution: int, began: int, ended: int) -> None:
        budget = self._budget
        if budget.left > 0:
            budget.left -= 1
            self.events.extend((index, execution, began, ended))
        else:
            self.left_out += 1


def device_ranges() -> Range | None:
    """NVTX ranges where CUDA is available, which Nsight Systems shows; None elsewhere."""
    return torch.cuda.nvtx.range if torch.cuda.is_available() else None
