"""Copies of modules, so that one trace can be compiled more than once."""

from __future__ import annotations

from dataclasses import fields

from . import OP_CLASSES, Op, Value
from .module import Module, Program


def clone(module: Module) -> Module:
    """A copy with new ops and values; types, declarations and locations are shared.

    Bodies of functions count as declarations, since no pass changes them.
    """
    return Module(
        module.name,
        module.phase,
        module.world,
        meshes=dict(module.meshes),
        functions=dict(module.functions),
        vjps=dict(module.vjps),
        bodies=dict(module.bodies),
        channels=dict(module.channels),
        programs=[_clone_program(program) for program in module.programs],
    )


def _clone_program(program: Program) -> Program:
    values: dict[Value, Value] = {}

    def new(value: Value) -> Value:
        values[value] = copy = Value(value.name, value.type)
        return copy

    def clone_op(op: Op) -> Op:
        operands = tuple([values[value] for value in op.operands])
        return copy_op(op, operands, tuple([new(value) for value in op.results]))

    params = [new(value) for value in program.params]
    return Program(program.name, params, [clone_op(op) for op in program.ops], program.rank)


_ATTRIBUTES: dict[type[Op], tuple[str, ...]] = {
    cls: tuple(f.name for f in fields(cls) if f.name not in ("operands", "results"))
    for cls in OP_CLASSES.values()
}


def copy_op(op: Op, operands: tuple[Value, ...], results: tuple[Value, ...]) -> Op:
    """The same op with other operands and results; `copy.copy` takes several times as long."""
    cls = type(op)
    copy = cls.__new__(cls)
    copy.operands = operands
    copy.results = results
    for name in _ATTRIBUTES[cls]:
        setattr(copy, name, getattr(op, name))
    return copy
