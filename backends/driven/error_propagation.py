"""Propagate errors in an execution that goes on: what depends on a failure is not run.

The results of what fails are poisoned. A call with a poisoned operand is not run, and its results
are poisoned; so is a later call on an actor whose state the failed one should have prepared. A
message of a poisoned value carries the error. Everything else runs as without a failure.
"""

from __future__ import annotations

from ..errors import TransportError
from ..failures.descriptions import failure_at, note_departure
from ..failures.interruptions import is_interruption, leaves
from ..poison import Poison
from ..program.code import Code
from ..program.instruction_info import InstructionInfo, Role
from ..program.instructions import Instruction
from ..program.linked import LinkedProgram


class ErrorPropagation:
    """The rest of one execution of a bound program, after its first failure.

    Attributes:
        poison: what has failed first.
        kept: the last interruption that was taken as the failure of a method.
    """

    def __init__(self, linked: LinkedProgram, code: Code) -> None:
        self.poison: Poison | None = None
        self.kept: BaseException | None = None
        self._linked = linked
        self._code = code
        self._failed: list[tuple[InstructionInfo, Poison]] = []
        self._distrusted: Poison | None = None

    def distrust(self, error: Exception) -> None:
        """Run no method of any actor, because of `error`."""
        calls = (i for i, info in enumerate(self._code.infos) if info.function is not None)
        self._distrusted = self._note(next(calls, 0), error)

    def fail(self, index: int, error: BaseException) -> None:
        """Instruction `index` has raised `error`; it is not run again."""
        info = self._code.infos[index]
        poison = self._note(index, error)
        if info.role is Role.COMPUTE:
            self._spoil(info, poison)
            if leaves(error):
                note_departure(error, poison.failure)
        elif info.role is Role.ISSUE:
            assert info.port is not None
            info.port.fail(poison)
        elif info.role is Role.AWAIT:
            self._write(info, poison)
        else:
            raise error

    def guarded(self, first: int) -> list[Instruction]:
        """The instructions from index `first` on, each run only if no operand is an error."""
        return [self._guarded(index) for index in range(first, len(self._code.instructions))]

    def _guarded(self, index: int) -> Instruction:
        instruction, info = self._code.instructions[index], self._code.infos[index]
        if info.role is Role.KEEP:
            return instruction

        def run() -> bool:
            poison = self._operand(info) or self._state(info)
            if poison is not None and info.role is Role.COMPUTE:
                self._spoil(info, poison)
                return True
            if poison is not None and info.role is Role.ISSUE:
                assert info.port is not None
                info.port.fail(poison)
                return True
            try:
                return instruction()
            except (Poison, TransportError) as error:
                self.fail(index, error)
            except BaseException as error:
                if info.role is not Role.COMPUTE and is_interruption(error):
                    raise  # nobody can say how far the message has come
                self.fail(index, error)  # and so it is not run again
                if leaves(error):
                    self.kept = error
                    raise
            return True

        return run

    def _operand(self, info: InstructionInfo) -> Poison | None:
        """The poison among the instruction's operands, if there is one."""
        for source in info.sources:
            value = self._code.registers[source]
            if isinstance(value, Poison):
                return value
        return None

    def _state(self, info: InstructionInfo) -> Poison | None:
        """The error that has spoiled the state that a call uses, if there is one."""
        function = info.function
        if function is None:
            return None
        if self._distrusted is not None and function.actor is not None:
            return self._distrusted
        for earlier, poison in self._failed:
            failed_function = earlier.function
            assert failed_function is not None
            if failed_function.conflicts_with(function):
                return poison
        return None

    def _spoil(self, info: InstructionInfo, poison: Poison) -> None:
        self._write(info, poison)
        if info.function is not None:
            self._failed.append((info, poison))

    def _write(self, info: InstructionInfo, poison: Poison) -> None:
        for target in info.targets:
            self._code.registers[target] = poison

    def _note(self, index: int, error: BaseException) -> Poison:
        if isinstance(error, Poison):
            poison = error
        else:
            linked = self._linked
            op = linked.program.ops[self._code.infos[index].op]
            failure = failure_at(op, linked.program, linked.module, error, linked.bodies)
            poison = Poison(failure, error)
        if self.poison is None:
            self.poison = poison
        return poison
