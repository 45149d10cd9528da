"""Copies of modules, so that one trace can be compiled more than once."""

from __future__ import annotations

import copy

from .module import Module, Program
from .ops import Op, Value


def clone(module: Module) -> Module:
    """A module of its own ops and values; types, declarations and locations are shared."""
    return Module(
        module.name,
        module.phase,
        module.world,
        functions=dict(module.functions),
        vjps=dict(module.vjps),
        channels=dict(module.channels),
        programs=[_clone_program(program) for program in module.programs],
    )


def _clone_program(program: Program) -> Program:
    values: dict[Value, Value] = {}

    def new(value: Value) -> Value:
        values[value] = made = Value(value.name, value.type)
        return made

    def clone_op(op: Op) -> Op:
        made = copy.copy(op)
        made.operands = tuple([values[value] for value in op.operands])
        made.results = tuple([new(value) for value in op.results])
        return made

    params = [new(value) for value in program.params]
    return Program(program.name, params, [clone_op(op) for op in program.ops], program.rank)
