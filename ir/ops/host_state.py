"""The functions that hand over state of an actor that rests in the host's memory.

`rest` gives the memory of the host. `enter` takes a copy of it on the device, in which the actor's
methods then find the state. `leave` gives that copy with all that they have written, and `settle`
takes the memory of the host, when it has been filled again. Functions of kind HOST that have a
`parameter` give the memory where that rests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from ..attributes import Effect
from ..types import DType, MemorySpace, TensorType, UnitType, ValueType
from . import Call
from .module import Function, FunctionKind, Module, Program


class HostState(NamedTuple):
    """The names of the functions of an actor."""

    rest: str
    enter: str
    leave: str
    settle: str

    @staticmethod
    def of(actor: str) -> HostState:
        """The functions of an actor, by its name."""
        return HostState(*(f"{actor}.state.{name}" for name in HostState._fields))

    @staticmethod
    def declare(module: Module, opaque: Function) -> HostState:
        """Declare the functions of the actor of an opaque function with `resting` bytes, once."""
        names = HostState.of(opaque.actor or "")
        here = TensorType(DType.U8, (opaque.resting,))
        there = replace(here, space=MemorySpace.HOST)
        unit: tuple[ValueType, ...] = (UnitType(),)
        kinds = {
            names.rest: Function(names.rest, (), (there,), effect=Effect.READ),
            names.enter: Function(names.enter, (here,), unit, effect=Effect.UPDATE),
            names.leave: Function(
                names.leave, (here,), (here,), effect=Effect.UPDATE, aliases=((0, 0),)
            ),
            names.settle: Function(names.settle, (there,), unit, effect=Effect.UPDATE),
        }
        for name, function in kinds.items():
            module.functions[name] = replace(
                function,
                kind=FunctionKind.HOST,
                actor=opaque.actor,
                loc=opaque.loc,
                ranks=opaque.ranks,
            )
        return names


def reads_at_end(program: Program, functions: Mapping[str, Function]) -> bool:
    """True if parameters at rest are read behind the last update of their actor.

    Copies from the host that stand ahead of an update are done when it has settled.
    """
    open_reads: set[str | None] = set()
    for op in program.ops:
        function = functions[op.fn.name] if isinstance(op, Call) else None
        if function is None or function.kind is not FunctionKind.HOST:
            continue
        if function.parameter is not None:
            open_reads.add(function.actor)
        elif function.name == HostState.of(function.actor or "").settle:
            open_reads.discard(function.actor)
    return bool(open_reads)
