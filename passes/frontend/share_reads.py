"""Call functions once that read what all microbatches and tasks of a step read alike."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from ...ir.ops import Call, Op, Transfer, Value
from ...ir.ops.module import Module
from ...ir.phases import Phase
from ..base import Pass


@dataclass(frozen=True)
class ShareReads(Pass):
    """Call each function that is `once` a single time for all its uses, and transfer its result so.

    After `inline`, each call of a method has calls of the functions that prepare the actor's
    parameters for it, such as the greatest magnitudes of weights in float8. Here the first of them
    serves all microbatches and tasks, up to a call that may change the actor's parameters.

    Before::

        %m.terms = call() {fn = @a.float8.maxima, mb = 0, task = 0F0} : f32[2|max:dp]@m
        %m = transfer(%m.terms) {mb = 0} : f32[2]@m
        %y = call(%m) {fn = @a.forward, mb = 0, task = 0F0} : f32[8]@m
        %n.terms = call() {fn = @a.float8.maxima, mb = 1, task = 0F1} : f32[2|max:dp]@m
        %n = transfer(%n.terms) {mb = 1} : f32[2]@m
        %z = call(%n) {fn = @a.forward, mb = 1, task = 0F1} : f32[8]@m

    After::

        %m.terms = call() {fn = @a.float8.maxima} : f32[2|max:dp]@m
        %m = transfer(%m.terms) : f32[2]@m
        %y = call(%m) {fn = @a.forward, mb = 0, task = 0F0} : f32[8]@m
        %z = call(%m) {fn = @a.forward, mb = 1, task = 0F1} : f32[8]@m
    """

    name: ClassVar[str] = "share-reads"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.TRACED,)

    def run(self, module: Module) -> bool:
        functions, program = module.functions, module.program
        if not any(function.once for function in functions.values()):
            return False
        versions: dict[str | None, int] = {}
        first: dict[Hashable, Op] = {}
        shared: set[Value] = set()
        renamed: dict[Value, Value] = {}
        ops: list[Op] = []
        for op in program.ops:
            op.operands = tuple([renamed.get(value, value) for value in op.operands])
            key: Hashable = None
            if isinstance(op, Call):
                function = functions[op.fn.name]
                if function.once:
                    version = sum(versions.get(state, 0) for state, _ in function.touches)
                    key = op.fn.name, op.operands, op.place, version
                for state, effect in function.touches:
                    if effect.changes_parameters:
                        versions[state] = versions.get(state, 0) + 1
            elif isinstance(op, Transfer) and shared.issuperset(op.operands):
                key = op.operands, op.result.type
            if key is None:
                ops.append(op)
            elif first.setdefault(key, op) is op:
                op.mb = op.task = None
                shared.update(op.results)
                ops.append(op)
            else:
                renamed.update(zip(op.results, first[key].results, strict=True))
        program.ops[:] = ops
        return True
