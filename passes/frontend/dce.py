"""Remove ops and declarations that are not used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...ir.ops import Backward, Call, Op, Return, Value
from ...ir.ops.module import Module
from ...ir.phases import Phase
from ..base import Pass
from .effect_order import effect_of


@dataclass(frozen=True)
class DeadCodeElimination(Pass):
    """Remove ops whose results are not used and that have no effect.

    Calls that change an actor's state or gradients, or check values, stay. Declarations that no op
    refers to go. A call that draws random numbers may go: each call has its own key, so no other
    call's numbers change.

    Before::

        %h = call(%x) {fn = @stage0.forward} : f32[2,8]@0
        %unused = call(%h) {fn = @stage0.norm} : f32[]@0
        %done = call() {fn = @stage0.update} : unit@0
        return(%h) {at = {0}}

    After::

        %h = call(%x) {fn = @stage0.forward} : f32[2,8]@0
        %done = call() {fn = @stage0.update} : unit@0
        return(%h) {at = {0}}
    """

    name: ClassVar[str] = "dce"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.TRACED, Phase.PLACED)
    optional: ClassVar[bool] = True

    def run(self, module: Module) -> bool:
        program = module.program
        live = _live(module, program.ops)
        changed = len(live) != len(program.ops)
        program.ops[:] = live
        return _drop_declarations(module) or changed


def _live(module: Module, ops: list[Op]) -> list[Op]:
    used: set[Value] = set()
    live = []
    for op in reversed(ops):
        if _is_root(module, op) or not used.isdisjoint(op.results):
            used.update(op.operands)
            live.append(op)
    live.reverse()
    return live


def _is_root(module: Module, op: Op) -> bool:
    if isinstance(op, Call):
        effect = effect_of(op, module.functions)
        is_check = module.functions[op.fn.name].checks
        return is_check or effect.changes_state or effect.is_on_gradients
    return op.synchronizes or isinstance(op, (Return, Backward))


def _drop_declarations(module: Module) -> bool:
    calls = [op for op in module.program.ops if isinstance(op, Call)]
    vjps = {op.vjp.name for op in calls if op.vjp is not None}
    functions = {op.fn.name for op in calls}
    for name in vjps:
        functions.update(module.vjps[name].functions)
    for name in module.bodies.keys() - functions:
        del module.bodies[name]
    for body in module.bodies.values():
        functions.update(op.fn.name for op in body.ops if isinstance(op, Call))
    before = len(module.functions) + len(module.vjps)
    for name in module.vjps.keys() - vjps:
        del module.vjps[name]
    for name in module.functions.keys() - functions:
        del module.functions[name]
    return len(module.functions) + len(module.vjps) != before
