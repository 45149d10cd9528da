"""Runs one rank's program, bound once and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import length_hint
from time import perf_counter
from typing import Any

from ...ir.printer import format_op
from ..base import Pause
from ..errors import Failure, RemoteError, StepTimeout
from ..failures.descriptions import failure_at, note_departure
from ..failures.flight import FlightRecord, Position
from ..failures.interruptions import leaves
from ..timing.statistics import ProfileEntry, Statistics
from ..timing.tallies import count
from ..timing.tracing import InstructionLog
from .binder import Binder
from .grad_mode import is_grad_enabled, set_grad_enabled
from .instructions import Instruction, getter
from .linked import LinkedProgram
from .type_checks import InputCheck


class Executable:
    """A bound program; one execution of it is in progress at a time.

    Either call `run`, or `start`, `step` until it is true, and take `outputs`.

    Args:
        linked: the program, and what it runs with.
        binder: binds it; the host's if none is given.

    Attributes:
        program: what it runs.
        module: what the program is part of.
        statistics: of the executions that have ended.
        execution: number of the execution in progress, or of the last one; -1 before the first.

    Raises:
        BindError: something that the program needs is missing or does not fit.
    """

    def __init__(self, linked: LinkedProgram, binder: Callable[..., Binder] = Binder) -> None:
        self.program = linked.program
        self.module = linked.module
        self.statistics = Statistics()
        self.execution = -1
        self._bodies = linked.bodies
        self._code = binder(linked, lambda: self.execution).bind()
        self._progress = (*linked.progress, *self._code.progress)
        self._check_inputs = InputCheck(linked.program)
        self._instructions = self._code.instructions
        self._profile: list[_Timer] | None = None
        self._get_outputs = getter(self._code.outputs)
        self._rest: Iterator[Instruction] | None = None
        self._pending: Instruction | None = None
        self._failed = False
        self._outputs: tuple[Any, ...] = ()
        self._started = self._since = self._blocked = 0.0

    @property
    def rank(self) -> int:
        """The rank whose program this is."""
        return self.program.rank or 0

    @property
    def outputs(self) -> tuple[Any, ...]:
        """What the last finished execution has returned; kept until the next one starts."""
        return self._outputs

    def run(
        self,
        inputs: Sequence[Any],
        pause: Pause,
        timeout: float | None = None,
        execution: int | None = None,
        checked: bool = False,
    ) -> tuple[Any, ...]:
        """Execute the program once, from start to end.

        Args:
            inputs: one value for each parameter of the program.
            pause: what to do between two fruitless polls.
            timeout: seconds until `StepTimeout`; None for no limit.
            execution, checked: as in `start`.

        Returns:
            What the program returns. Its tensors belong to the caller.

        Raises:
            InputError: the inputs do not fit; nothing has been issued.
            RemoteError: an op or a method raised; `reset` before the next execution.
            StepTimeout: the time is up; `reset` before the next execution.
        """
        self.start(inputs, execution, checked)
        deadline = None if timeout is None else self._started + timeout
        had_grad = is_grad_enabled()
        set_grad_enabled(False)
        try:
            self._run_all(pause, deadline, timeout)
        finally:
            set_grad_enabled(had_grad)
        return self._outputs

    def start(
        self, inputs: Sequence[Any], execution: int | None = None, checked: bool = False
    ) -> None:
        """Begin an execution.

        Args:
            inputs: one value for each parameter of the program.
            execution: its number, which random numbers depend on; None counts on from the last.
            checked: whether the inputs are known to fit.

        Raises:
            InputError: the inputs do not fit.
            RuntimeError: an execution is in progress, or has failed without `reset`.
        """
        if self._rest is not None:
            state = "has failed" if self._failed else "is in progress"
            raise RuntimeError(f"execution {self.execution} {state}: reset() before the next")
        if not checked:
            self._check_inputs(inputs)
        self.execution = self.execution + 1 if execution is None else execution
        registers = self._code.registers
        registers[:] = self._code.template
        registers[: len(inputs)] = inputs
        self._outputs = ()
        self._blocked = 0.0
        self._started = self._since = perf_counter()
        self._rest = iter(self._instructions)

    def step(self, limit: int | None = None) -> bool:
        """Go on until the program ends or has to wait, or `limit` instructions have run.

        Returns:
            Whether the program has ended.

        Raises:
            RemoteError: an op or a method raised; `reset` before the next execution.
            RuntimeError: no execution is in progress.
        """
        had_grad = is_grad_enabled()
        set_grad_enabled(False)
        try:
            return self._advance(limit)
        finally:
            set_grad_enabled(had_grad)

    def reset(self) -> None:
        """Give up the execution in progress, if any, and be ready for the next.

        What methods have done to their actors stays done. Messages in flight are the business of
        the communicators' `reset`.
        """
        self._code.registers[:] = self._code.template
        self._rest = None
        self._pending = None
        self._failed = False

    @property
    def progress(self) -> tuple[int, bool]:
        """Instructions begun in this execution, and whether the last of them waits."""
        begun = len(self._instructions) - (length_hint(self._rest) if self._rest else 0)
        return begun, self._pending is not None

    @property
    def begun(self) -> int:
        """How many ops of the program have been begun in this execution."""
        count, _ = self.progress
        ops = self._code.ops
        return ops[count] if count < len(ops) else len(self.program.ops)

    def position(self) -> Position:
        """Where it is; cheap, and safe to call from a pause or another thread."""
        code = self._code
        if self._rest is None:
            return Position(self.rank, self.execution, 0, None, running=False)
        begun, waits = self.progress
        last = max(begun - 1, 0)
        awaited = code.awaited[last] if waits else None
        seconds = perf_counter() - self._since
        return Position(self.rank, self.execution, code.ops[last], awaited, seconds=seconds)

    def record(self, log: InstructionLog | None) -> None:
        """Record every instruction from the next execution on; None: no longer."""
        code = self._code
        plain = code.instructions
        self._instructions = plain if log is None else log.wrap(code, lambda: self.execution)

    def profile(self, on: bool) -> None:
        """Time every instruction from the next execution on, or stop doing so.

        Each instruction costs some 150 ns more while it is timed, and nothing once it is not.
        """
        timers = [_Timer(run) for run in self._code.instructions] if on else None
        self._profile = timers
        self._instructions = [t.run for t in timers] if timers else self._code.instructions

    def profile_entries(self) -> list[ProfileEntry]:
        """What was timed since `profile(True)`, by instruction; empty if it is off."""
        return [
            ProfileEntry(op, format_op(self.program.ops[op]), timer.runs, timer.seconds)
            for op, timer in zip(self._code.ops, self._profile or (), strict=False)
        ]

    def _run_all(self, pause: Pause, deadline: float | None, timeout: float | None) -> None:
        assert self._rest is not None
        for instruction in self._rest:
            try:
                done = instruction()
            except BaseException as error:
                if self._leaves(error):
                    raise
                raise self._fail(error) from error
            if not done:
                self._pending = instruction
                self._since = perf_counter()
                self._wait(pause, deadline, timeout)
        self._end()

    def _advance(self, limit: int | None) -> bool:
        rest = self._rest
        if rest is None or self._failed:
            raise RuntimeError("no execution is in progress: start() one")
        try:
            pending = self._pending
            if pending is not None:
                if not pending():
                    return False
                self._resume()
            for instruction in rest if limit is None else islice(rest, limit):
                if not instruction():
                    self._pending = instruction
                    self._since = perf_counter()
                    return False
        except BaseException as error:
            if self._leaves(error):
                raise
            raise self._fail(error) from error
        if length_hint(rest):
            return False
        self._end()
        return True

    def _resume(self) -> None:
        self._pending = None
        now = perf_counter()
        self._blocked += now - self._since
        self._since = now

    def _end(self) -> None:
        registers = self._code.registers
        self._outputs = self._get_outputs(registers)
        registers[:] = self._code.template
        self._rest = None
        count(self.statistics, perf_counter() - self._started, self._blocked)

    def _wait(self, pause: Pause, deadline: float | None, timeout: float | None) -> None:
        """Poll the pending instruction until it is done."""
        poll, progress = self._pending, self._progress
        assert poll is not None
        polls = 0
        while True:
            try:
                for move_on in progress:
                    move_on()
                # A second look costs less than to come back here.
                if poll() or poll():
                    break
            except BaseException as error:
                if self._leaves(error):
                    raise
                raise self._fail(error) from error
            polls += 1
            pause(polls)
            if deadline is not None and perf_counter() > deadline:
                raise self._timeout(timeout)
        self._resume()

    def _leaves(self, error: BaseException) -> bool:
        """Whether `error` is for the whole process; then it says which method it came out of."""
        if not leaves(error):
            return False
        failure = self._failure(error)
        if failure.method is not None:
            note_departure(error, failure)
        return True

    def _failure(self, error: BaseException) -> Failure:
        op = self.program.ops[self.position().op]
        return failure_at(op, self.program, self.module, error, self._bodies)

    def _fail(self, error: BaseException) -> RemoteError:
        self._failed = True
        failed = RemoteError(self._failure(error))
        failed.__cause__ = error  # machine code made of this module would leave `from` out
        return failed

    def _timeout(self, timeout: float | None) -> StepTimeout:
        where = FlightRecord(self.module, [self.position()]).describe().strip()
        return StepTimeout(f"the step has not ended after {timeout:g} s: {where}")


class _Timer:
    """An instruction that times itself."""

    __slots__ = ("_instruction", "runs", "seconds")

    def __init__(self, instruction: Instruction) -> None:
        self._instruction = instruction
        self.runs = 0
        self.seconds = 0.0

    def run(self) -> bool:
        began = perf_counter()
        done = self._instruction()
        self.seconds += perf_counter() - began
        self.runs += 1
        return done


def poll_only(polls: int) -> None:
    """A pause that does not pause: for programs that never wait, and for measurements."""
