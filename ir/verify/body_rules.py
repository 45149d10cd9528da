"""Check the bodies of functions that are programs."""

from __future__ import annotations

from collections.abc import Iterator

from ..attributes import Effect
from ..ops import Call, Op, Return, Transfer
from ..ops.module import Function, FunctionKind, Module, Program
from ..phases import Phase
from ..text.diagnostics import Diagnostic

_OPS = (Call, Transfer, Return)
_STRENGTH = {effect: number for number, effect in enumerate(Effect)}


def check_bodies(module: Module) -> Iterator[Diagnostic]:
    """The problems between bodies and their functions; other rules are those of all programs."""
    if module.bodies and module.phase is not Phase.TRACED:
        yield Diagnostic(
            f"bodies of functions in phase {module.phase}",
            program=next(iter(module.bodies.values())),
            help="inline puts them in the place of calls, before insert-transfers",
        )
    for function in module.functions.values():
        if function.kind is FunctionKind.PROGRAM and function.name not in module.bodies:
            yield Diagnostic(
                f"function @{function.name} is a program, and the module has no body of it",
                loc=function.loc,
                help=f"write body @{function.name}(...) {{ ... }}",
            )
    for name, body in module.bodies.items():
        owner = module.functions.get(name)
        if owner is None or owner.kind is not FunctionKind.PROGRAM or body.name != name:
            yield Diagnostic(
                f"body @{name} belongs to no function of kind program",
                program=body,
                help="declare the function with kind = program, or drop the body",
            )
        else:
            yield from _check_body(owner, body, module)


def _check_body(owner: Function, body: Program, module: Module) -> Iterator[Diagnostic]:
    for verb, types, values in (
        ("takes", owner.inputs, tuple(body.params)),
        ("returns", owner.outputs, body.outputs if _ends(body) else ()),
    ):
        body_types = tuple(value.type for value in values)
        if body_types != types:
            yield Diagnostic(
                f"function @{owner.name} {verb} ({', '.join(map(str, types))}), "
                f"and its body ({', '.join(map(str, body_types))})",
                program=body,
            )
    for op in body.ops:
        if problem := _check_op(op, owner, module):
            yield Diagnostic(problem, op, body)


def _ends(body: Program) -> bool:
    return bool(body.ops) and isinstance(body.ops[-1], Return)


def _check_op(op: Op, owner: Function, module: Module) -> str | None:
    if not isinstance(op, _OPS):
        return f"{op.opcode} in the body of @{owner.name}, which may call, transfer and return"
    if not isinstance(op, Call) or (called := module.functions.get(op.fn.name)) is None:
        return None
    if called.kind is FunctionKind.PROGRAM:
        return f"@{owner.name} calls @{called.name}, which is a program as well"
    if op.vjp is not None:
        return f"a call in the body of @{owner.name} has a derivative of its own"
    if called.actor not in (None, owner.actor):
        return f"@{owner.name} of actor {owner.actor} calls a function of actor {called.actor}"
    if called.actor is not None and _STRENGTH[called.effect] > _STRENGTH[owner.effect]:
        return (
            f"@{owner.name} has effect {owner.effect.value}, and calls @{called.name}, "
            f"whose effect is {called.effect.value}"
        )
    if called.random and not owner.random:
        return f"@{called.name} draws random numbers, and @{owner.name} does not say that it does"
    return None
