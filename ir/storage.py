"""Group the values of a program that share storage."""

from __future__ import annotations

from collections.abc import Mapping

from .module import Function, Program
from .ops import Call, Collective, Free, Op, Value


class SharedStorage:
    """The groups of a program's values that share storage, by union-find.

    A value shares storage with its views, with the values that wait for it, with the future that
    promised it, with the buffer that it was received into, and with the results of calls that may
    alias it. What a collective hands back to its root stays apart: it is a value of its own to the
    proof of progress, in which a slot is free with the value that came in it.
    """

    def __init__(self, program: Program, functions: Mapping[str, Function]) -> None:
        self._program = program
        self._parents: dict[Value, Value] = {}
        for op in program.ops:
            self._visit(op, functions)

    def of(self, value: Value) -> Value:
        """The value that stands for the group of `value`."""
        root = self._parents.get(value)
        if root is None:
            return value
        while (parent := self._parents.get(root)) is not None:
            root = parent
        while value is not root:
            self._parents[value], value = root, self._parents[value]
        return root

    def last_frees(self) -> dict[Value, int]:
        """For each group that is freed: the index of its last `free`, at which storage goes."""
        ops = self._program.ops
        return {self.of(op.operands[0]): i for i, op in enumerate(ops) if isinstance(op, Free)}

    def share(self, one: Value, other: Value) -> None:
        """Make one group of those of two values."""
        one, other = self.of(one), self.of(other)
        if one is not other:
            self._parents[one] = other

    def _visit(self, op: Op, functions: Mapping[str, Function]) -> None:
        if isinstance(op, Call):
            function = functions.get(op.fn.name)  # the verifier says where one is missing
            for output, operand in function.aliases if function is not None else ():
                self.share(op.results[output], op.operands[operand])
        elif op.shares_operand and not isinstance(op, Collective) and op.results and op.operands:
            self.share(op.results[0], op.operands[0])
