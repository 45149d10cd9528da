"""Run the instructions of a bound program: the one loop of all ranks and graphs.

An instruction that is not done makes the engine wait. Given a pause, it waits inside the loop; else
it returns, and goes on from there at the next call. An instruction's error goes to the owner, which
raises it, or replaces the instructions that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import length_hint
from time import perf_counter
from typing import Any, Protocol

import torch

from ..base import Pause
from ..failures.flight import Position
from ..timing.tallies import Tally, count
from .code import Code
from .instructions import Instruction, getter
from .linked import LinkedProgram
from .tracing import ProgramLog

# Entering `torch.no_grad()` takes a microsecond, which a step of a few microseconds notices.
_set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
_is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled

Locate = Callable[[int], int]
"""Maps the index of an instruction that runs to that of the bound program's instruction for it."""


class Owner(Protocol):
    """The owner of the program that an engine runs."""

    def failed(self, error: BaseException) -> None:
        """Takes an instruction's error: raises it, or replaces the instructions that are left."""

    def ended(self, outputs: tuple[Any, ...]) -> None:
        """Takes the program's outputs, when all its instructions have run."""


class Engine:
    """Runs a bound program, one execution after the other.

    An owner calls `start`, and `advance` until it is true; or `abandon` at any time. The engine
    does not refer to its owner, so a program that nobody refers to any more is freed at once, with
    its memory.

    Args:
        linked: the program.
        code: the bound program.
        tally: counts the executions that end.
        runs_without_grad: True if autograd has to be off while instructions run.

    Attributes:
        code: the bound program.
        pending: the instruction that it waits at, if it waits.
        running: True while an execution is in progress.
        located: maps this execution's instructions to those of the bound program; None if they
            correspond one to one.
        is_pausing: True while it pauses, and after an error that has come out of a pause.
    """

    def __init__(
        self,
        linked: LinkedProgram,
        code: Code,
        tally: Tally,
        runs_without_grad: bool = True,
    ) -> None:
        self.code = code
        self.pending: Instruction | None = None
        self.running = False
        self.is_pausing = False
        self.runs_without_grad = runs_without_grad
        self._rank = linked.rank
        self._tally = tally
        self._progress = (*linked.progress, *code.progress)
        self._registers = code.registers
        self._template = code.template
        self._registers[:] = code.template
        self._get_outputs = getter(code.outputs)
        self._instructions: Sequence[Instruction] = code.instructions
        self._locate: Locate | None = None
        self.located: Locate | None = None
        self._rest: Iterator[Instruction] = iter(())
        self._list: Sequence[Instruction] = ()
        self._started = self._since = self._blocked = 0.0

    def start(self, inputs: Sequence[Any], execution: int) -> None:
        """Begin an execution.

        Args:
            inputs: one value for each parameter of the program, checked.
            execution: its number, which random numbers depend on.
        """
        self.code.execution = execution
        self.running = True
        if inputs:
            self._registers[: len(inputs)] = inputs
        self._blocked = 0.0
        self._started = self._since = perf_counter()
        self.located = self._locate
        self._list = self._instructions
        self._rest = iter(self._instructions)

    def advance(self, owner: Owner, limit: int | None = None, pause: Pause | None = None) -> bool:
        """Go on until the program ends or has to wait, or `limit` instructions have run.

        Args:
            owner: is told how it ends.
            limit: the most instructions to run; None for no limit.
            pause: what to do between two fruitless polls; None to return where it has to wait.

        Returns:
            True if the execution has ended.
        """
        rest = self._rest
        try:
            pending = self.pending
            if pending is not None:
                # A second poll costs less than coming back here.
                if not (pending() or pending()):
                    for move_on in self._progress:
                        move_on()
                    return False
                self.resume()
            # The pending instruction only passes values on; the rest may compute.
            had_grad = self.runs_without_grad and _is_grad_enabled()
            try:
                if had_grad:
                    _set_grad_enabled(False)
                for instruction in rest if limit is None else islice(rest, limit):
                    if not instruction():
                        self.pending = instruction
                        self._since = perf_counter()
                        if pause is None:
                            return False
                        self._wait(instruction, pause)
            finally:
                if had_grad:
                    _set_grad_enabled(True)
        except BaseException as error:
            owner.failed(error)
        else:
            if limit is not None and length_hint(rest):
                return False
            registers = self._registers
            outputs = self._get_outputs(registers)
            registers[:] = self._template
            self.running = False
            count(self._tally, perf_counter() - self._started, self._blocked)
            owner.ended(outputs)
            return True
        return Engine.advance(self, owner, limit, pause)  # with what is left after the error

    def abandon(self) -> None:
        """Give up the execution in progress, if any; idempotent. Messages are not its business."""
        self._rest = iter(())
        self.pending = None
        self.is_pausing = False
        self._registers[:] = self._template
        self.running = False

    def replace_rest(self, instructions: Sequence[Instruction]) -> None:
        """Replace the instructions that are left in this execution.

        Args:
            instructions: one for each of the last instructions of the bound program.
        """
        self.resume()
        self.located = None
        self._list = self.code.instructions
        self._rest = iter(instructions)

    def use(self, instructions: Sequence[Instruction], locate: Locate | None = None) -> None:
        """Run other instructions from the next execution on.

        Args:
            instructions: instructions that do the same as those of the bound program.
            locate: maps their indices to those of the bound program; None if they correspond one to
                one.
        """
        self._instructions = instructions
        self._locate = locate

    def record(self, log: ProgramLog | None) -> None:
        """Record every instruction from the next execution on; with None, stop recording."""
        self.use(self.code.instructions if log is None else log.wrap(self.code))

    def outputs(self) -> tuple[Any, ...]:
        """The program's outputs, when all its instructions have run."""
        return self._get_outputs(self._registers)

    def move_on(self) -> None:
        """Move on whatever is pending in this rank's communication."""
        for move_on in self._progress:
            move_on()

    def resume(self) -> None:
        """End a wait, and count it as blocked time."""
        if self.pending is not None:
            self.pending = None
            now = perf_counter()
            self._blocked += now - self._since
            self._since = now

    # -- where it is ------------------------------------------------------------------------

    @property
    def begun(self) -> int:
        """The number of instructions that have been begun in this execution."""
        return len(self._list) - length_hint(self._rest) if self.running else 0

    @property
    def index(self) -> int:
        """Index in the bound program of the instruction that was begun last."""
        begun = max(self.begun - 1, 0)
        locate = self.located  # read once: other threads ask for the position, too
        at = begun if locate is None else locate(begun)
        return min(at, len(self.code.infos) - 1)

    def position(self) -> Position:
        """The position in its program; cheap, and safe to call from a pause or another thread."""
        code = self.code
        if not self.running or not code.infos:
            return Position(self._rank, code.execution, 0, None, running=self.running)
        info = code.infos[self.index]
        seconds = perf_counter() - self._since
        if self.pending is None:
            return Position(self._rank, code.execution, info.op, seconds=seconds)
        return Position(
            self._rank,
            code.execution,
            info.op,
            info.awaited,
            reporter=info.reporter,
            seconds=seconds,
        )

    def _wait(self, poll: Instruction, pause: Pause) -> None:
        """Poll the pending instruction until it is done."""
        progress = self._progress
        polls = 0
        while True:
            for move_on in progress:
                move_on()
            if poll() or poll():
                break
            polls += 1
            self.is_pausing = True
            pause(polls)
            self.is_pausing = False
        self.resume()
