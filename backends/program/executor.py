"""Run one rank's program of a step that all ranks run together: bound once and replayed.

The loop over its instructions is the engine's (`engine.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..base import Pause
from ..errors import Failure, RemoteError
from ..failures.descriptions import failure_at, note_departure
from ..failures.flight import Position
from ..failures.interruptions import leaves
from ..timing.statistics import Statistics
from .binder import Binder
from .code import Code
from .engine import Engine
from .linked import LinkedProgram
from .tracing import ProgramLog
from .type_checks import InputCheck


class Executable:
    """A bound program; one execution of it is in progress at a time.

    Either call `run`, or `start`, `step` until it is true, and take `outputs`.

    Args:
        linked: the program, and what it runs with.
        code: the bound program; if None, the host's binder binds it.

    Attributes:
        program: the program that it runs.
        module: the module of the program.
        statistics: statistics of the executions that have ended.
        outputs: what the last finished execution has returned; kept until the next one starts.

    Raises:
        BindError: something that the program needs is missing or does not fit.
    """

    def __init__(self, linked: LinkedProgram, code: Code | None = None) -> None:
        self.program = linked.program
        self.module = linked.module
        self.statistics = Statistics()
        self.outputs: tuple[Any, ...] = ()
        self._bodies = linked.bodies
        self._check_inputs = InputCheck(linked.program)
        self._code = Binder(linked).bind() if code is None else code
        self._engine = Engine(linked, self._code, self.statistics)
        self._has_failed = False

    @property
    def rank(self) -> int:
        """The rank whose program this is."""
        return self.program.rank or 0

    @property
    def execution(self) -> int:
        """Number of the execution in progress, or of the last one; -1 before the first."""
        return self._code.execution

    def run(
        self,
        inputs: Sequence[Any],
        pause: Pause,
        execution: int | None = None,
        checked: bool = False,
    ) -> tuple[Any, ...]:
        """Execute the program once, from start to end.

        Args:
            inputs: one value for each parameter of the program.
            pause: what to do between two fruitless polls.
            execution, checked: as in `start`.

        Returns:
            The results of the program. Its tensors belong to the caller.

        Raises:
            InputError: the inputs do not fit; nothing has been issued.
            RemoteError: an op or a method raised; `reset` before the next execution.
        """
        self.start(inputs, execution, checked)
        self._engine.advance(self, None, pause)
        return self.outputs

    def start(
        self, inputs: Sequence[Any], execution: int | None = None, checked: bool = False
    ) -> None:
        """Begin an execution.

        Args:
            inputs: one value for each parameter of the program.
            execution: its number, which random numbers depend on; None counts on from the last.
            checked: True if the inputs are known to fit.

        Raises:
            InputError: the inputs do not fit.
            RuntimeError: an execution is in progress, or has failed without `reset`.
        """
        if self._engine.running:
            state = "has failed" if self._has_failed else "is in progress"
            raise RuntimeError(f"execution {self.execution} {state}: reset() before the next")
        if not checked:
            self._check_inputs(inputs)
        self.outputs = ()
        self._engine.start(inputs, self._code.execution + 1 if execution is None else execution)

    def step(self, limit: int | None = None) -> bool:
        """Go on until the program ends or has to wait, or `limit` instructions have run.

        Returns:
            True if the program has ended.

        Raises:
            RemoteError: an op or a method raised; `reset` before the next execution.
            RuntimeError: no execution is in progress.
        """
        if not self._engine.running or self._has_failed:
            raise RuntimeError("no execution is in progress: start() one")
        return self._engine.advance(self, limit)

    def reset(self) -> None:
        """Give up the execution in progress, if any, and be ready for the next.

        The work of methods on their actors stays done. Messages in flight stay there until the
        communicators' `reset`.
        """
        self._engine.abandon()
        self._has_failed = False

    @property
    def progress(self) -> tuple[int, bool]:
        """Instructions begun in this execution, and whether the last of them waits."""
        return self._engine.begun, self._engine.pending is not None

    @property
    def begun(self) -> int:
        """The number of ops of the program that have been begun in this execution."""
        engine, infos = self._engine, self._code.infos
        if engine.running and engine.begun < len(infos):
            return infos[engine.begun].op
        return len(self.program.ops)

    def position(self) -> Position:
        """The position in its program; cheap, and safe to call from a pause or another thread."""
        return self._engine.position()

    def record(self, log: ProgramLog | None) -> None:
        """Record every instruction from the next execution on; with None, stop recording."""
        self._engine.record(log)

    def ended(self, outputs: tuple[Any, ...]) -> None:
        """Keep what the program returns."""
        self.outputs = outputs

    def failed(self, error: BaseException) -> None:
        """End the execution, because of an error."""
        if self._engine.is_pausing:
            self._engine.is_pausing = False
            raise error
        op = self.program.ops[self._engine.position().op]
        failure = failure_at(op, self.program, self.module, error, self._bodies)
        if leaves(error):
            # It is for the whole process, so a note says which method it came out of.
            if failure.method is not None:
                note_departure(error, failure)
            raise error
        self._has_failed = True
        raise _remote(failure, error) from error


def _remote(failure: Failure, error: BaseException) -> RemoteError:
    failed = RemoteError(failure)
    failed.__cause__ = error  # `from` alone does not set it where this module is compiled
    return failed


def poll_only(polls: int) -> None:
    """A pause that does not pause: for programs that never wait, and for measurements."""
