"""One of the executions of a graph that may be in flight at a time, on one rank.

It runs the same instructions as a step that all ranks run together (`executor.py`), but it ends by
itself: there is no commit, and an exception is data that travels to whoever started the execution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import length_hint
from time import perf_counter
from typing import Any

from ...ir.module import FunctionKind, Module, Program
from ...ir.ops import Call, Collective, Constant, Copy, Send, View
from ..base import Port
from ..errors import TransportError
from ..failures.error_propagation import Careful
from ..failures.flight import Position
from ..failures.interruptions import is_interruption, leaves
from ..failures.poison import Poison
from ..program.binder import Binder
from ..program.grad_mode import is_grad_enabled, set_grad_enabled
from ..program.instruction_info import KEEP, Role, Step
from ..program.instructions import Instruction, getter
from ..program.linked import LinkedProgram
from ..program.type_checks import InputCheck
from ..timing.tallies import Tally, count
from ..timing.tracing import InstructionLog
from .ticket_locks import Tickets, Turnstiles

Guard = Callable[[], str | None]
"""Says how an actor has changed since it was traced, if it has."""


@dataclass(frozen=True, slots=True)
class Reports:
    """How a rank whose failures would reach nobody by values tells the driver that it has ended.

    Attributes:
        send: on such a rank, where to send the report.
        receive: on the driver, where the report of each such rank comes in.
    """

    send: Port | None = None
    receive: tuple[tuple[int, Port], ...] = ()


class Instance:
    """A rank's program, bound to registers and channels of its own.

    One execution of it is in progress at a time: `start`, then `advance` until it is true, then
    `outputs` and `poison`.

    Args:
        linked: the program, and what it runs with.
        turnstiles: of the rank; they order the executions of all graphs.
        statistics: counts the executions of all instances of the graph on this rank.
        guards: checked before each execution; where one is broken, all calls of the execution
            fail.
        reports: what the rank sends or receives beside the program's own messages.
        binder: binds the program; the host's if none is given.

    Attributes:
        pending: the instruction that it waits at, if it waits.
        running: whether an execution is in progress.
        outputs: what the last execution has returned; a poison stands where a value failed.
        poison: what failed first in the last execution, as far as this rank has learnt of it.
        delivery: to be called before the last execution's result is used; None if that is a value
            as any other.
        on_end: called when an execution has ended.
        on_failure: called when something has failed in it, which goes on to its end.
        kept: the last interruption that it could take as the failure of a method.
    """

    # Of the class until it is set: Python finds no more than 30 attributes of an object fast.
    kept: BaseException | None = None

    def __init__(
        self,
        linked: LinkedProgram,
        turnstiles: Turnstiles,
        statistics: Tally,
        guards: Sequence[Guard] = (),
        reports: Reports | None = None,
        binder: Callable[..., Binder] = Binder,
    ) -> None:
        program, module = linked.program, linked.module
        self.program = program
        self.module = module
        self.execution = -1
        self.pending: Instruction | None = None
        self.running = False
        self.outputs: tuple[Any, ...] = ()
        self.poison: Poison | None = None
        self.delivery: Callable[[], None] | None = None
        self.on_end: Callable[[Instance], None] | None = None
        self.on_failure: Callable[[Poison], None] | None = None
        self._bodies = linked.bodies
        self._tickets = Tickets(turnstiles)
        self._code = binder(linked, lambda: self.execution, self._tickets).bind()
        self._takes_tickets = not self._tickets.is_empty
        self._leave_out_clears()
        self._send_inputs_first(len(program.params))
        self._add_reports(reports or Reports())
        self._instructions = self._code.instructions
        self._registers = self._code.registers
        self._template = self._code.template
        self._registers[:] = self._template
        self._get_outputs = getter(self._code.outputs)
        self._progress = (*linked.progress, *self._code.progress)
        self._guards = tuple(guards)
        self._needs_no_grad = needs_no_grad(program, module)
        self._statistics = statistics
        self._careful: Careful | None = None
        self._rest: Iterator[Instruction] = iter(())
        self._started = self._since = self._blocked = 0.0
        self.check_inputs = InputCheck(program)

    @property
    def rank(self) -> int:
        """The rank whose program this is."""
        return self.program.rank or 0

    def start(self, inputs: Sequence[Any], execution: int) -> None:
        """Begin an execution; the inputs have been checked.

        Args:
            inputs: one value for each parameter of the program.
            execution: its number, which random numbers depend on.
        """
        self.execution = execution
        self.running = True
        self.poison = None
        for index, value in enumerate(inputs):
            self._registers[index] = value
        if self._takes_tickets:
            self._tickets.take()
        self._blocked = 0.0
        self._started = self._since = perf_counter()
        self._rest = iter(self._instructions)
        for guard in self._guards:
            change = guard()
            if change is not None:
                self._distrust(RuntimeError(f"{change}; compile the step again"))
                break

    def advance(self) -> bool:
        """Go on until the program ends or has to wait.

        Returns:
            Whether the execution has ended.
        """
        if self._careful is not None:
            return self.advance_by(None)
        try:
            pending = self.pending
            if pending is not None:
                # A second look costs less than to come back here.
                if not (pending() or pending()):
                    for move_on in self._progress:
                        move_on()
                    return False
                self.pending = None
                now = perf_counter()
                self._blocked += now - self._since
                self._since = now
            # What it waits at only passes values on; the rest may compute.
            had_grad = self._needs_no_grad and is_grad_enabled()
            try:
                if had_grad:
                    set_grad_enabled(False)
                for instruction in self._rest:
                    if not instruction():
                        self.pending = instruction
                        self._since = perf_counter()
                        return False
            finally:
                if had_grad:
                    set_grad_enabled(True)
        except BaseException as error:
            return self._go_on_after(error, None)
        self._end()
        return True

    def advance_by(self, limit: int | None) -> bool:
        """The same, for no more than `limit` instructions."""
        had_grad = self._needs_no_grad and is_grad_enabled()
        try:
            if had_grad:
                set_grad_enabled(False)
            return self._advance_by(limit)
        finally:
            if had_grad:
                set_grad_enabled(True)

    def abandon(self) -> None:
        """Give up the execution in progress, if any; idempotent. Messages are not its business."""
        self._rest = iter(())
        self.pending = None
        self._careful = None
        self.kept = None
        self.outputs = ()
        self.delivery = None
        self._registers[:] = self._template
        if self.running:
            self._statistics.failures += 1
        self.running = False

    def record(self, log: InstructionLog | None) -> None:
        """Record every instruction from the next execution on; None: no longer.

        What runs after a failure, and because of it, is not recorded.
        """
        code = self._code
        plain = code.instructions
        self._instructions = plain if log is None else log.wrap(code, lambda: self.execution)

    def foresee(self) -> None:
        """Look for failures among the messages that have come and are not due yet."""
        if self.poison is not None:
            return
        for step in self._code.steps[: self._index() + 1]:
            look = getattr(step.port, "foresee", None)
            poison = look() if look is not None else None
            if poison is not None:
                self._learn(poison)
                return

    def position(self) -> Position:
        """Where it is."""
        if not self.running:
            return Position(self.rank, self.execution, 0, None, running=False)
        at = self._index()
        op = self._code.ops[at]
        seconds = perf_counter() - self._since
        if self.pending is None:
            return Position(self.rank, self.execution, op, seconds=seconds)
        awaited, reporter = self._code.awaited[at], self._code.steps[at].reporter
        return Position(self.rank, self.execution, op, awaited, reporter=reporter, seconds=seconds)

    def _advance_by(self, limit: int | None) -> bool:
        if self._careful is not None:
            return self._advance_with_care(limit)
        try:
            pending = self.pending
            if pending is not None:
                if not pending():
                    for move_on in self._progress:
                        move_on()
                    return False
                self.pending = None
                now = perf_counter()
                self._blocked += now - self._since
                self._since = now
            rest = self._rest
            for instruction in rest if limit is None else islice(rest, limit):
                if not instruction():
                    self.pending = instruction
                    self._since = perf_counter()
                    return False
        except BaseException as error:
            return self._go_on_after(error, limit)
        if limit is not None and length_hint(rest):
            return False
        self._end()
        return True

    def _index(self) -> int:
        """Index of the instruction that was begun last."""
        careful = self._careful  # once: other threads ask for the position, too
        if careful is not None:
            return min(careful.at, len(self._code.steps) - 1)
        return max(len(self._instructions) - length_hint(self._rest) - 1, 0)

    def _end(self) -> None:
        registers = self._registers
        on_end = self.on_end
        if on_end is not None:
            self.outputs = self._get_outputs(registers)
        registers[:] = self._template
        self.running = False
        count(self._statistics, perf_counter() - self._started, self._blocked)
        if on_end is not None:
            on_end(self)

    # -- after a failure --------------------------------------------------------------------

    def _go_on_after(self, error: BaseException, limit: int | None) -> bool:
        """What `advance` does when an instruction has raised."""
        index = self._index()
        if self._code.steps[index].role is not Role.COMPUTE:
            if not isinstance(error, (Poison, TransportError)) and is_interruption(error):
                raise error  # nobody can say how far a message has come
        elif leaves(error):
            self._take_care(index, error)
            self.kept = error
            raise error
        self._take_care(index, error)
        return self._advance_with_care(limit)

    def _take_care(self, index: int, error: BaseException) -> None:
        if self.pending is not None:
            self.pending = None
            now = perf_counter()
            self._blocked += now - self._since
            self._since = now
        self._careful = Careful(self._code, self.program, self.module, self._bodies)
        self._careful.fail(index, error)
        self._learn(self._careful.poison)

    def _learn(self, poison: Poison | None) -> None:
        """Something has failed, here or elsewhere."""
        if self.poison is None and poison is not None:
            self.poison = poison
            if self.on_failure is not None:
                self.on_failure(poison)

    def _distrust(self, error: Exception) -> None:
        """Run nothing of what the graph calls on this rank."""
        self._careful = Careful(self._code, self.program, self.module, self._bodies)
        self._careful.distrust(error)
        self._learn(self._careful.poison)

    def _advance_with_care(self, limit: int | None) -> bool:
        careful = self._careful
        assert careful is not None
        if self.pending is not None:
            self.pending = None
            now = perf_counter()
            self._blocked += now - self._since
            self._since = now
            for move_on in self._progress:
                move_on()
        try:
            ended = careful.advance(limit)
        except BaseException as error:
            self.kept = careful.kept if careful.kept is error else None
            raise
        if ended:
            self._careful = None
            self._statistics.failures += 1
            self._end()
        elif careful.waits:
            self.pending = careful.waits
            self._since = perf_counter()
        return ended

    def _leave_out_clears(self) -> None:
        """Without what empties registers at the very end: they all are emptied then."""
        code = self._code
        while code.clears and code.clears[-1] == len(code.instructions) - 1:
            code.clears.pop()
            for list_ in (code.instructions, code.steps, code.ops, code.awaited):
                list_.pop()

    def _send_inputs_first(self, inputs: int) -> None:
        """Before anything is asked for: whoever waits for an input can then start.

        Sends keep their order among each other, and so do all other instructions.
        """
        code = self._code
        first = []
        for index, step in enumerate(code.steps):
            if step.role is Role.ISSUE and step.sources:
                sends = isinstance(self.program.ops[code.ops[index]], Send)
                if not sends or step.sources[0] >= inputs:
                    break  # what comes later must not overtake it
                first.append(index)
        order = [*first, *(i for i in range(len(code.steps)) if i not in set(first))]
        code.instructions[:] = [code.instructions[i] for i in order]
        code.steps[:] = [code.steps[i] for i in order]
        code.ops[:] = [code.ops[i] for i in order]
        code.awaited[:] = [code.awaited[i] for i in order]

    # -- reports ----------------------------------------------------------------------------

    def _add_reports(self, reports: Reports) -> None:
        """Post the receives first of all, await them last; send when all else is done."""
        for rank, port in reports.receive:
            self._insert(0, partial(_start, port), Step(Role.ISSUE, port=port))
            self._insert(None, partial(_take, port), Step(Role.AWAIT, port=port, reporter=rank))
        if reports.send is not None:
            self._insert(None, partial(self._report, reports.send), KEEP)
            self._insert(None, reports.send.poll, KEEP)

    def _insert(self, at: int | None, instruction: Instruction, step: Step) -> None:
        code = self._code
        index = len(code.instructions) if at is None else at
        code.instructions.insert(index, instruction)
        code.steps.insert(index, step)
        code.ops.insert(index, 0 if at == 0 else max(len(self.program.ops) - 1, 0))
        code.awaited.insert(index, None)

    def _report(self, port: Port) -> bool:
        poison = self._careful.poison if self._careful is not None else None
        if poison is None:
            port.start(None)
        else:
            port.fail(poison)
        return True


def needs_no_grad(program: Program, module: Module) -> bool:
    """Whether autograd must be off while the program runs.

    What only calls opaque methods and passes values on does without.
    """
    for op in program.ops:
        if isinstance(op, (Collective, Constant, Copy, View)):
            return True
        if isinstance(op, Call) and (module.functions[op.fn.name].kind is not FunctionKind.OPAQUE):
            return True
    return False


def _start(port: Port) -> bool:
    port.start(None)
    return True


def _take(port: Port) -> bool:
    if not port.poll():
        return False
    port.take()
    port.release()
    return True
