"""Calls with bodies of their own, through which an execution is timed or watched."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from cg.backends.base import Body
from cg.backends.program import builtins
from cg.ir.attributes import Symbol
from cg.ir.ops import Call
from cg.ir.ops.clone import clone
from cg.ir.ops.module import Function, FunctionKind, Module

Wrap = Callable[[int, int, Call, Body], Body]
"""Makes the body of one call: of its rank, its place in that rank's program, itself, its body."""


def instrument(
    module: Module, bodies: Mapping[str, Body], ranks: Collection[int], wrap: Wrap
) -> tuple[Module, dict[str, Body]]:
    """Give every call of a scheduled module a function, and so a body, of its own.

    The programs are the same but for the names of functions, so they bind and run like the module.
    No executor needs to know, and programs that nobody watches pay nothing.

    Args:
        module: scheduled; it is not changed.
        bodies: by function name, as the executor takes them; builtins need none.
        ranks: those that this process plays. The calls of others are renamed like theirs, so that
            all ranks have the same plan, and get no body.
        wrap: makes the body of each call.

    Returns:
        The module with the new names, and the bodies of the calls of `ranks`.
    """
    renamed = clone(module)
    wrapped: dict[str, Body] = {}
    for program in renamed.programs:
        rank = program.rank or 0
        for index, op in enumerate(program.ops):
            if not isinstance(op, Call):
                continue
            function = module.functions[op.fn.name]
            body = _body(function, bodies) if rank in ranks else None
            own = replace(function, name=f"{function.name}.{rank}.{index}", kind=_kind(function))
            if body is not None:
                wrapped[own.name] = wrap(rank, index, op, body)
            op.fn = Symbol(own.name)
            renamed.functions[own.name] = own
    return renamed, wrapped


def _kind(function: Function) -> FunctionKind:
    """A builtin gets its body like any traced function."""
    return FunctionKind.GRAPH if function.kind is FunctionKind.BUILTIN else function.kind


def _body(function: Function, bodies: Mapping[str, Body]) -> Body | None:
    if function.kind is FunctionKind.BUILTIN:
        return builtins.implementation(function)
    return bodies.get(function.name)
