"""One of the executions of a graph that may be in flight at a time, on one rank.

It runs the same instructions as a step that all ranks run together (`program/executor.py`), but it
ends by itself: there is no commit, and an exception is data that travels to the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...ir.ops import Assemble, Call, Collective, Constant, Copy, Reserve, Slice, View
from ...ir.ops.module import FunctionKind, Module, Program
from ..base import PeekingPort, Port
from ..errors import TransportError
from ..failures.flight import Position
from ..failures.interruptions import is_interruption, leaves
from ..poison import Poison
from ..program.code import Code
from ..program.engine import Engine
from ..program.instruction_info import KEEP, Role
from ..program.linked import LinkedProgram
from ..program.ticket_locks import Tickets
from ..program.tracing import ProgramLog
from ..program.type_checks import InputCheck
from ..timing.tallies import Tally
from .arrange import Reports, await_reports, last_op, leave_out_clears, send_inputs_first
from .error_propagation import ErrorPropagation

Guard = Callable[[], str | None]
"""Describes how an actor has changed since it was traced; None if it has not."""


class Instance:
    """A rank's program, bound to registers and channels of its own.

    One execution of it is in progress at a time: `start`, then the engine's `advance` until it is
    true, then `outputs` and `poison`.

    Args:
        linked: the program, and what it runs with.
        code: the program, bound with tickets; it is arranged here for executions in flight.
        statistics: counts the executions of all instances of the graph on this rank.
        guards: checked before each execution; where one is broken, all calls of the execution
            fail.
        reports: what the rank sends or receives beside the program's own messages.

    Attributes:
        engine: the engine that runs it.
        outputs: what the last execution has returned; a poison stands where a value failed.
        poison: what failed first in the last execution, as far as this rank has learnt of it.
        delivery: a function to call before the last execution's result is used; None if there is
            nothing to do.
        on_end: called when an execution has ended.
        on_failure: called at the first failure of an execution, which still goes on to its end.
        kept: the last interruption that was taken as the failure of a method.
    """

    def __init__(
        self,
        linked: LinkedProgram,
        code: Code,
        statistics: Tally,
        guards: Sequence[Guard] = (),
        reports: Reports | None = None,
    ) -> None:
        program, module = linked.program, linked.module
        assert code.tickets is not None, "several executions may be in flight"
        self.program = program
        self.module = module
        self.outputs: tuple[Any, ...] = ()
        self.poison: Poison | None = None
        self.delivery: Callable[[], None] | None = None
        self.on_end: Callable[[Instance], None] | None = None
        self.on_failure: Callable[[Poison], None] | None = None
        self.kept: BaseException | None = None
        self.check_inputs = InputCheck(program)
        self._linked = linked
        self._code = code
        self._tickets: Tickets = code.tickets
        self._takes_tickets = not code.tickets.is_empty
        leave_out_clears(code)
        send_inputs_first(code, program)
        self._add_reports(reports or Reports())
        self._statistics = statistics
        self.engine = self._make_engine(needs_no_grad(program, module))
        self._guards = tuple(guards)
        self._peeking: list[tuple[int, PeekingPort]] = []
        for index, info in enumerate(code.infos):
            port = info.port
            if info.role is Role.ISSUE and isinstance(port, PeekingPort):
                self._peeking.append((index, port))
        self._propagation: ErrorPropagation | None = None

    @property
    def rank(self) -> int:
        """The rank whose program this is."""
        return self.program.rank or 0

    @property
    def execution(self) -> int:
        """Number of the execution in progress, or of the last one; -1 before the first."""
        return self._code.execution

    @property
    def running(self) -> bool:
        """True while an execution is in progress."""
        return self.engine.running

    def start(self, inputs: Sequence[Any], execution: int) -> None:
        """Begin an execution; the inputs have been checked.

        Args:
            inputs: one value for each parameter of the program.
            execution: its number, which random numbers depend on.
        """
        self.poison = None
        self.engine.start(inputs, execution)
        if self._takes_tickets:
            self._tickets.take()
        for guard in self._guards:
            change = guard()
            if change is not None:
                self._distrust(RuntimeError(f"{change}; compile the step again"))
                break

    def abandon(self) -> None:
        """Give up the execution in progress, if any; idempotent. Its messages stay in flight."""
        if self.engine.running:
            self._statistics.failures += 1
        self.engine.abandon()
        self._propagation = None
        self.kept = None
        self.outputs = ()
        self.delivery = None

    def record(self, log: ProgramLog | None) -> None:
        """Record every instruction from the next execution on; with None, stop recording.

        Instructions that run after a failure, in place of the program's, are not recorded.
        """
        self.engine.record(log)

    def peek_errors(self) -> None:
        """Look for failures among the messages that have come and are not due yet."""
        if self.poison is not None:
            return
        begun = self.engine.index
        for index, port in self._peeking:
            poison = port.peek_error() if index <= begun else None
            if poison is not None:
                self._learn(poison)
                return

    def position(self) -> Position:
        """The position in its program."""
        return self.engine.position()

    def _make_engine(self, runs_without_grad: bool) -> Engine:
        return Engine(self._linked, self._code, self._statistics, runs_without_grad)

    def ended(self, outputs: tuple[Any, ...]) -> None:
        """Hand over what the program returns."""
        if self._propagation is not None:
            self._propagation = None
            self._statistics.failures += 1
        if self.on_end is not None:
            self.outputs = outputs
            self.on_end(self)

    # -- after a failure --------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """Let the rest of the instructions pass an error on."""
        if self._propagation is not None:
            self.kept = error if self._propagation.kept is error else None
            raise error
        index = self.engine.index
        computes = self._code.infos[index].role is Role.COMPUTE
        is_message = isinstance(error, (Poison, TransportError))
        if not computes and not is_message and is_interruption(error):
            raise error  # nobody can say how far a message has come
        self._propagate(index, error)
        if computes and leaves(error):
            self.kept = error
            raise error

    def _propagate(self, index: int, error: BaseException) -> None:
        """Instruction `index` has failed: run those behind it that do not depend on it."""
        propagation = ErrorPropagation(self._linked, self._code)
        propagation.fail(index, error)
        self._propagation = propagation
        self.engine.replace_rest(propagation.guarded(index + 1))
        self._learn(propagation.poison)

    def _distrust(self, error: Exception) -> None:
        """Run none of the methods that the graph calls on this rank."""
        propagation = self._propagation = ErrorPropagation(self._linked, self._code)
        propagation.distrust(error)
        self.engine.replace_rest(propagation.guarded(0))
        self._learn(propagation.poison)

    def _learn(self, poison: Poison | None) -> None:
        """Note the first failure of the execution, here or elsewhere."""
        if self.poison is None and poison is not None:
            self.poison = poison
            if self.on_failure is not None:
                self.on_failure(poison)

    # -- reports ----------------------------------------------------------------------------

    def _add_reports(self, reports: Reports) -> None:
        """Send a report when all else is done; await the reports of others."""
        await_reports(self._code, self.program, reports)
        last = KEEP._replace(op=last_op(self.program))
        for port in reports.send:
            self._code.insert(None, partial(self._report, port), last)
            self._code.insert(None, port.poll, last)

    def _report(self, port: Port) -> bool:
        poison = self._propagation.poison if self._propagation is not None else None
        if poison is None:
            port.start(None)
        else:
            port.fail(poison)
        return True


def needs_no_grad(program: Program, module: Module) -> bool:
    """True if autograd must be off while the program runs.

    A program that only calls opaque methods and passes values on does not need it.
    """
    for op in program.ops:
        if isinstance(op, Reserve | Assemble | Collective | Constant | Copy | Slice | View):
            return True
        if isinstance(op, Call) and (module.functions[op.fn.name].kind is not FunctionKind.OPAQUE):
            return True
    return False
