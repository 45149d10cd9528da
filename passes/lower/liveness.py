"""Find the values of a rank's program that share storage, and the last use of each storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...ir.module import Function, Program
from ...ir.ops import (
    Call,
    Collective,
    Constant,
    Op,
    Recv,
    Return,
    Send,
    Value,
    View,
    Wait,
)
from ...ir.types import FutureType, TensorType, UnitType


@dataclass(eq=False, slots=True)
class Storage:
    """The storage of a value and of all that may alias it.

    Attributes:
        owners: values that may have brought in storage which the program can give back, in the
            order in which they were made. Views and waits between streams bring in none, and
            parameters and constants of the step are not the program's to give back.
        last: index of the last op that needs it: that makes or takes it, or that waits for a
            communication which reads it.
        reads: units that say that a communication has read it.
        slots: receives that may have brought it in a slot.
        escapes: whether it is used after the end of the program, or nobody knows how long.
    """

    owners: list[Value] = field(default_factory=list)
    last: int = -1
    reads: list[Value] = field(default_factory=list)
    slots: list[Recv] = field(default_factory=list)
    escapes: bool = False


class Storages:
    """The storages of a program: a union-find over its values, in near-linear time."""

    def __init__(self, program: Program, functions: Mapping[str, Function]) -> None:
        self._functions = functions
        self._storage: dict[Value, Storage] = {}
        self._merged: dict[Storage, Storage] = {}
        self._makers: dict[Value, Op] = {}
        # Futures of communications that read a value and have not been waited for.
        self._reading: dict[Value, Value] = {}
        for value in program.params:
            self._storage[value] = Storage()
        for index, op in enumerate(program.ops):
            self._visit(op, index)
        for value in self._reading.values():
            if (storage := self.of(value)) is not None:
                storage.escapes = True

    def of(self, value: Value) -> Storage | None:
        """The storage of a value; None for units and futures."""
        found = self._storage.get(value)
        if found is None or found not in self._merged:
            return found
        root = found
        while root in self._merged:
            root = self._merged[root]
        while found is not root:
            self._merged[found], found = root, self._merged[found]
        return root

    def all(self) -> list[Storage]:
        """Every storage once, in the order in which they were made."""
        return [storage for storage in self._storage.values() if storage not in self._merged]

    def _visit(self, op: Op, index: int) -> None:
        for value in op.operands:
            self._use(value, index)
        if isinstance(op, Wait):
            self._visit_wait(op, index)
        elif isinstance(op, Send | Recv | Collective):
            for future in op.results:
                self._makers[future] = op
                if op.operands and not isinstance(op, Recv):
                    self._reading[future] = op.operands[0]
        elif isinstance(op, Return):
            for value in op.operands:
                if (storage := self.of(value)) is not None:
                    storage.escapes = True
        else:
            self._visit_local(op, index)

    def _visit_local(self, op: Op, index: int) -> None:
        owner = not isinstance(op, View) and not (isinstance(op, Constant) and op.ref is not None)
        for value in op.results:
            self._make(value, index, owner)
        if isinstance(op, View):
            self._share(op.result, op.operands[0])
        elif isinstance(op, Call):
            for output, operand in self._functions[op.fn.name].aliases:
                self._share(op.results[output], op.operands[operand])

    def _visit_wait(self, op: Wait, index: int) -> None:
        (source,) = op.operands
        read = self._reading.pop(source, None)
        if read is not None:
            self._use(read, index)
            storage = self.of(read)
            if storage is not None and op.results and isinstance(op.result.type, UnitType):
                storage.reads.append(op.result)
        if op.results:
            self._receive(op, self._makers.get(source), index)

    def _receive(self, op: Wait, maker: Op | None, index: int) -> None:
        """Note where the value lives that a wait gives; `maker` made the future, if it is one."""
        (source,) = op.operands
        self._make(op.result, index, owner=maker is not None)
        if maker is None:
            self._share(op.result, source)
        elif isinstance(maker, Recv) and maker.operands:
            self._share(op.result, maker.operands[0])
        elif isinstance(maker, Recv) and isinstance(op.result.type, TensorType):
            self._storage[op.result].slots.append(maker)
        elif isinstance(maker, Collective) and maker.returns_operand and maker.operands:
            self._share(op.result, maker.operands[0])

    def _make(self, value: Value, index: int, owner: bool) -> None:
        if not isinstance(value.type, UnitType | FutureType):
            self._storage[value] = Storage([value] if owner else [], index)

    def _use(self, value: Value, index: int) -> None:
        storage = self.of(value)
        if storage is not None:
            storage.last = index

    def _share(self, one: Value, other: Value) -> None:
        new, old = self.of(one), self.of(other)
        if new is None or old is None or new is old:
            return
        old.owners += new.owners
        old.reads += new.reads
        old.slots += new.slots
        old.last = max(old.last, new.last)
        old.escapes = old.escapes or new.escapes
        self._merged[new] = old
