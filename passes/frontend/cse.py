"""Compute equal values once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from ...ir.attributes import Effect
from ...ir.ops import Call, Constant, Op, Return, Slice, Value, View, attributes
from ...ir.ops.module import Function, FunctionKind, Module, Program
from ...ir.phases import Phase
from ..base import Pass


@dataclass(frozen=True)
class CommonSubexpressionElimination(Pass):
    """Use the first of several ops that compute the same value at the same place.

    The ops are constants, views, calls of pure functions, and calls that read an actor while no
    call changes it in between. All calls that draw random numbers stay, and those that read a
    parameter on the host: `fsdp` has merged them. A value that leaves the
    plan's control, as an output or an operand of an opaque call, stays as well: its receiver may
    change it, so it needs storage of its own. Microbatches are kept apart, so that none waits for
    another.

    Before::

        %a = view(%x) {dim = 0, length = 2, mb = 0, start = 0} : f32[2,8]@0
        %b = view(%x) {dim = 0, length = 2, mb = 0, start = 0} : f32[2,8]@0
        %c = call(%a, %b) {fn = @add, mb = 0} : f32[2,8]@0

    After::

        %a = view(%x) {dim = 0, length = 2, mb = 0, start = 0} : f32[2,8]@0
        %c = call(%a, %a) {fn = @add, mb = 0} : f32[2,8]@0
    """

    name: ClassVar[str] = "cse"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.TRACED, Phase.PLACED)
    optional: ClassVar[bool] = True

    def run(self, module: Module) -> bool:
        program = module.program
        escaping = _escaping(module, program)
        versions: dict[str | None, int] = {}
        first: dict[Hashable, Op] = {}
        renamed: dict[Value, Value] = {}
        ops: list[Op] = []
        for op in program.ops:
            if renamed:
                op.operands = tuple([renamed.get(value, value) for value in op.operands])
            key = _key(module, op, versions)
            if key is None or not escaping.isdisjoint(op.results):
                ops.append(op)
                continue
            same = first.setdefault(key, op)
            if same is op:
                ops.append(op)
            else:
                renamed.update(zip(op.results, same.results, strict=True))
        changed = len(ops) != len(program.ops)
        program.ops[:] = ops
        return changed


def _key(module: Module, op: Op, versions: dict[str | None, int]) -> Hashable | None:
    """The key that equal ops share; None if the op equals no other.

    `versions` counts the changes of each state so far; this function updates it.
    """
    version = 0
    if isinstance(op, Call):
        function = module.functions[op.fn.name]
        for state, effect in function.touches:
            if effect.changes_state:
                versions[state] = versions.get(state, 0) + 1
        if not _is_repeatable(function):
            return None
        if function.effect is Effect.READ:
            version = sum(versions.get(state, 0) for state, _ in function.touches)
    elif not isinstance(op, (Constant, View, Slice)):
        return None
    types = tuple([value.type for value in op.results])
    fields: Hashable = tuple(attributes(op).items())
    if isinstance(op, Constant):
        fields = repr(fields)  # tells 1, 1.0 and true apart, and 0.0 from -0.0, which compare equal
    return (type(op), op.operands, types, fields, version)


def _is_repeatable(function: Function) -> bool:
    if function.resting:
        return False  # `fsdp` has decided how often a parameter comes from the host
    if function.random or function.kind is FunctionKind.OPAQUE:
        return False
    return function.effect in (Effect.PURE, Effect.READ)


def _escaping(module: Module, program: Program) -> set[Value]:
    """The values whose storage user code may get."""
    escaping: set[Value] = set()
    for op in reversed(program.ops):
        if isinstance(op, Return) or (isinstance(op, (View, Slice)) and op.result in escaping):
            escaping.update(op.operands)
        elif isinstance(op, Call):
            escaping.update(_escaping_operands(module.functions[op.fn.name], op, escaping))
    return escaping


def _escaping_operands(function: Function, op: Call, escaping: set[Value]) -> Iterable[Value]:
    if function.kind is FunctionKind.OPAQUE:
        return op.operands
    return [
        op.operands[operand]
        for result, operand in function.aliases
        if op.results[result] in escaping
    ]
