"""Assign registers to the values of a program, and find where their storage may be freed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ...ir.ops import Call, Free, Op, Return, Value, Wait
from ...ir.ops.module import FunctionKind, Module, Program
from ...ir.ops.storage import SharedStorage
from ...ir.types import FutureType


@dataclass(frozen=True, slots=True)
class RegisterLayout:
    """Registers of a program.

    Attributes:
        registers: the register of each value. The parameters come first, and the results of one op
            that is no `wait` stand side by side. The result of a `wait` for a value that is there
            already, or for a future that was waited for before, shares the register of that value.
        size: the number of registers.
        issuers: the op that made each future.
        first_waits: the first `wait` for each future, by future.
        clears: registers to be emptied at a `free`, by the index of that op.
        releases: futures whose port is released at a `free`, by the index of that op.
        escaping: values that may outlive the execution, or be changed, in a user's hands.
        handled: values that an opaque method has taken or made, and that its actor may change.
        from_opaque: the values of `handled` that such a method has made.
    """

    registers: dict[Value, int]
    size: int
    issuers: dict[Value, Op]
    first_waits: dict[Value, Op]
    clears: dict[int, int]
    releases: dict[int, tuple[Value, ...]]
    escaping: frozenset[Value]
    handled: frozenset[Value]
    from_opaque: frozenset[Value]


def lay_out(program: Program, module: Module) -> RegisterLayout:
    """Assign registers and find where each is used and freed for the last time.

    Storage is shared by a value, its views, the values that wait for it, and outputs of calls that
    may alias it. It is freed at the last `free` of any of them, if no op uses it after that;
    otherwise it stays until the execution ends.
    """
    builder = _Layouter(program, module)
    for value in program.params:
        builder.define(value)
    for op in program.ops:
        builder.visit(op)
    last_use, last_free = builder.last_touches(builder.registers)
    clears = {at: register for register, at in last_free.items() if last_use.get(register, -1) < at}
    return RegisterLayout(
        registers=builder.registers,
        size=builder.size,
        issuers=builder.issuers,
        first_waits=builder.first_waits,
        clears=clears,
        releases=builder.releases(),
        escaping=builder.escaping(),
        handled=builder.sharing_with(
            value
            for op in program.ops
            if builder.is_opaque(op)
            for value in (*op.operands, *op.results)
        ),
        from_opaque=builder.sharing_with(
            value for op in program.ops if builder.is_opaque(op) for value in op.results
        ),
    )


def given_away(program: Program, layout: RegisterLayout, at: int) -> tuple[int, ...]:
    """The registers of operands that a `free` right behind an op clears; the op may do so itself.

    All other uses of their values, on any stream, come ahead of the `free`, and so of the op.
    """
    operands = {layout.registers[value] for value in program.ops[at].operands}
    behind = itertools.takewhile(
        lambda index: isinstance(program.ops[index], Free), range(at + 1, len(program.ops))
    )
    cleared = (layout.clears[index] for index in behind if index in layout.clears)
    return tuple(register for register in cleared if register in operands)


K = TypeVar("K")


class _Layouter:
    def __init__(self, program: Program, module: Module) -> None:
        self.program = program
        self.module = module
        self.registers: dict[Value, int] = {}
        self.size = 0
        self.issuers: dict[Value, Op] = {}
        self.first_waits: dict[Value, Op] = {}
        self._storage = SharedStorage(program, module.functions)

    def define(self, value: Value) -> None:
        self.registers[value] = self.size
        self.size += 1

    def visit(self, op: Op) -> None:
        if isinstance(op, Wait):
            self._visit_wait(op)
            return
        for result in op.results:
            self.define(result)
            if isinstance(result.type, FutureType):
                self.issuers[result] = op

    def _visit_wait(self, op: Wait) -> None:
        source = op.operands[0]
        first = self.first_waits.get(source)
        if first is None and isinstance(source.type, FutureType):
            self.first_waits[source] = op
            if op.results:
                self.define(op.result)
        elif op.results:
            if first is not None and first.results:
                source = first.result
            self.registers[op.result] = self.registers[source]

    def last_touches(self, keys: Mapping[Value, K]) -> tuple[dict[K, int], dict[K, int]]:
        """The index of the last use, and of the last `free`, of the values of each key."""
        uses: dict[K, int] = {}
        frees: dict[K, int] = {}
        for index, op in enumerate(self.program.ops):
            if isinstance(op, Free):
                frees[keys[op.operands[0]]] = index
                continue
            for value in op.operands:
                uses[keys[value]] = index
        return uses, frees

    def releases(self) -> dict[int, tuple[Value, ...]]:
        roots = {value: self._storage.of(value) for value in self.registers}
        uses, frees = self.last_touches(roots)
        released: dict[int, tuple[Value, ...]] = {}
        for future in self.first_waits:
            root = roots[future]
            at = frees.get(root)
            if at is not None and uses.get(root, -1) < at:
                released[at] = (*released.get(at, ()), future)
        return released

    def escaping(self) -> frozenset[Value]:
        return self.sharing_with(
            value
            for op in self.program.ops
            if isinstance(op, Return) or self.is_opaque(op)
            for value in op.operands
        )

    def sharing_with(self, values: Iterable[Value]) -> frozenset[Value]:
        """All values that share storage with one of `values`."""
        roots = set(map(self._storage.of, values))
        return frozenset(value for value in self.registers if self._storage.of(value) in roots)

    def is_opaque(self, op: Op) -> bool:
        """True if an op calls a method that is not traced."""
        return (
            isinstance(op, Call) and self.module.functions[op.fn.name].kind is FunctionKind.OPAQUE
        )
