"""Replace calls of functions that are programs by their ops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ...ir.ops import Call, Op, Return, Value
from ...ir.ops.clone import copy_op
from ...ir.ops.module import Module, Program
from ...ir.ops.names import Names
from ...ir.phases import Phase
from ...ir.types import relocate
from ..base import Pass


@dataclass(frozen=True)
class Inline(Pass):
    """Replace each call of a function that is a program by the ops of its body.

    A function is a program if the layout of a value changes inside of it: it calls its parts, with
    transfers in between. It stays one call until its gradients are derived. Then its transfers
    become ops of the step, which are placed, scheduled and checked like all others. The ops belong
    to the microbatch and the task of the call. The first part that draws random numbers gets the
    key of the call, so it draws the numbers of the undivided function. A traced method has at most
    one such part; in programs written by hand, each further one gets a key of its own.

    Before::

        body @m0.up(%x: f32[8,64]) {
          %h = call(%x) {fn = @m0.up.0} : f32[8,64|+tp]
          %s = transfer(%h) : f32[8,64]
          %y = call(%s) {fn = @m0.up.1} : f32[8,64]
          return(%y)
        }
        ...
        %y = call(%x) {fn = @m0.up, mb = 0} : f32[8,64]@m

    After::

        %y.h = call(%x) {fn = @m0.up.0, mb = 0} : f32[8,64|+tp]@m
        %y.s = transfer(%y.h) {mb = 0} : f32[8,64]@m
        %y = call(%y.s) {fn = @m0.up.1, mb = 0} : f32[8,64]@m
    """

    name: ClassVar[str] = "inline"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.TRACED,)

    def run(self, module: Module) -> bool:
        if not module.bodies:
            return False
        inliner = _Inliner(module, module.program)
        ops: list[Op] = []
        for op in module.program.ops:
            op.operands = tuple([inliner.renamed.get(value, value) for value in op.operands])
            body = module.bodies.get(op.fn.name) if isinstance(op, Call) else None
            if body is None:
                ops.append(op)
            else:
                assert isinstance(op, Call)
                ops += inliner.expand(op, body)
        module.program.ops[:] = ops
        for name in module.bodies:
            del module.functions[name]
        module.bodies.clear()
        return True


class _Inliner:
    """Expands calls.

    Attributes:
        renamed: results of calls that equal an operand or another result, with that value.
    """

    def __init__(self, module: Module, program: Program) -> None:
        self._module = module
        self._names = Names.of(program)
        keys = (op.key for op in program.ops if isinstance(op, Call) and op.key is not None)
        self._next_key = max(keys, default=-1) + 1
        self.renamed: dict[Value, Value] = {}

    def expand(self, call: Call, body: Program) -> Iterator[Op]:
        """The ops of the body, on the call's operands and with its results."""
        values: dict[Value, Value] = dict(zip(body.params, call.operands, strict=True))
        defined = {value for op in body.ops for value in op.results}
        for inner, result in zip(body.outputs, call.results, strict=True):
            if inner in defined and inner not in values:
                values[inner] = result
            else:  # an operand, or a value that is returned twice
                self.renamed[result] = values[inner]
        key = call.key
        for op in body.ops:
            if isinstance(op, Return):
                continue
            copy = self._copy(op, call, values)
            if isinstance(copy, Call) and self._module.functions[copy.fn.name].random:
                copy.key, key = self._key(key), None
            yield copy

    def _key(self, key: int | None) -> int:
        """The key, or a new one if it is None."""
        if key is not None:
            return key
        self._next_key += 1
        return self._next_key - 1

    def _copy(self, op: Op, call: Call, values: dict[Value, Value]) -> Op:
        for value in op.results:
            if value not in values:
                name = self._names.fresh(f"{call.results[0].name}.{value.name}")
                values[value] = Value(name, relocate(value.type, call.place))
        operands = tuple([values[value] for value in op.operands])
        copy = copy_op(op, operands, tuple([values[value] for value in op.results]))
        copy.mb, copy.task, copy.loc = call.mb, call.task, op.loc or call.loc
        return copy
