"""Goes on with an execution in which something has failed: what depends on it is not run.

The results of what fails are poisoned. A call with a poisoned operand is not run, and its results
are poisoned; so is a later call on an actor whose state the failed one should have prepared. A
message of a poisoned value carries the error. Everything else happens as if nothing had been.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...ir.module import Module, Program
from ..base import Body
from ..errors import TransportError
from ..program.binder import Code
from ..program.instruction_info import Role, Step
from ..program.instructions import Instruction
from .descriptions import failure_at, note_departure
from .interruptions import is_interruption, leaves
from .poison import Poison


class Careful:
    """The rest of one execution of a bound program, after its first failure.

    Attributes:
        at: index of the instruction to run next, or again.
        poison: what has failed first.
        waits: the instruction that it waits at, if it waits.
        kept: the last interruption that it could take as the failure of a method.
    """

    def __init__(
        self, code: Code, program: Program, module: Module, bodies: Mapping[str, Body]
    ) -> None:
        self.at = 0
        self.poison: Poison | None = None
        self.waits: Instruction | None = None
        self.kept: BaseException | None = None
        self._code = code
        self._program = program
        self._module = module
        self._bodies = bodies
        self._failed: list[tuple[Step, Poison]] = []
        self._distrusted: Poison | None = None

    def distrust(self, error: Exception) -> None:
        """Run no method of any actor, because of `error`."""
        calls = (i for i, step in enumerate(self._code.steps) if step.function is not None)
        self._distrusted = self._note(next(calls, 0), error)

    def fail(self, index: int, error: BaseException) -> None:
        """Instruction `index` has raised `error`; go on with the next one."""
        step = self._code.steps[index]
        poison = self._note(index, error)
        if step.role is Role.COMPUTE:
            self._spoil(step, poison)
            if leaves(error):
                note_departure(error, poison.failure)
        elif step.role is Role.ISSUE:
            assert step.port is not None
            step.port.fail(poison)
        elif step.role is Role.AWAIT:
            self._write(step, poison)
        else:
            raise error
        self.at = index + 1

    def advance(self, limit: int | None = None) -> bool:
        """Go on until the program ends or has to wait, or `limit` instructions have run.

        Returns:
            Whether the program has ended.
        """
        count = len(self._code.steps)
        last = count if limit is None else min(count, self.at + limit)
        self.waits = None
        while self.at < last:
            instruction = self._code.instructions[self.at]
            if not self._run(self.at, instruction):
                self.waits = instruction
                return False
            self.at += 1
        return self.at == count

    def _run(self, index: int, instruction: Instruction) -> bool:
        step = self._code.steps[index]
        if step.role is Role.KEEP:
            return instruction()
        poison = self._operand(step) or self._state(step)
        if poison is not None and step.role is Role.COMPUTE:
            self._spoil(step, poison)
            return True
        if poison is not None and step.role is Role.ISSUE:
            assert step.port is not None
            step.port.fail(poison)
            return True
        try:
            return instruction()
        except (Poison, TransportError) as error:
            return self._has_failed(index, error)
        except BaseException as error:
            if step.role is not Role.COMPUTE and is_interruption(error):
                raise  # nobody can say how far a message has come
            if not leaves(error):
                return self._has_failed(index, error)
            self.fail(index, error)  # and so it is not run again
            self.kept = error
            raise

    def _has_failed(self, index: int, error: BaseException) -> bool:
        self.fail(index, error)
        self.at = index
        return True

    def _operand(self, step: Step) -> Poison | None:
        """The poison among the step's operands, if there is one."""
        for source in step.sources:
            value = self._code.registers[source]
            if isinstance(value, Poison):
                return value
        return None

    def _state(self, step: Step) -> Poison | None:
        """Why the state that a call finds is not what it should be, if that is so."""
        function = step.function
        if function is None:
            return None
        if self._distrusted is not None and function.actor is not None:
            return self._distrusted
        for earlier, poison in self._failed:
            other = earlier.function
            assert other is not None
            if other.conflicts_with(function):
                return poison
        return None

    def _spoil(self, step: Step, poison: Poison) -> None:
        self._write(step, poison)
        if step.function is not None:
            self._failed.append((step, poison))

    def _write(self, step: Step, poison: Poison) -> None:
        for target in step.targets:
            self._code.registers[target] = poison

    def _note(self, index: int, error: BaseException) -> Poison:
        if isinstance(error, Poison):
            poison = error
        else:
            op = self._program.ops[self._code.ops[index]]
            failure = failure_at(op, self._program, self._module, error, self._bodies)
            poison = Poison(failure, error)
        if self.poison is None:
            self.poison = poison
        return poison
