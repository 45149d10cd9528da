"""Where operands and results must be: an operand is at every rank where its op runs."""

from __future__ import annotations

from ..module import Module, Phase
from ..ops import (
    AllToAll,
    Backward,
    Barrier,
    Broadcast,
    Call,
    Collective,
    Op,
    ReduceScatter,
    Return,
    Transfer,
    Value,
)
from ..phases import has_places
from ..types import Place
from .op_rules import Problem

# Before insert-transfers these, and collectives, take their operands from wherever they are.
_TAKE_FROM_ANYWHERE = (Call, Return, Backward)


def check_value_place(value: Value, module: Module) -> None:
    """A type has a place before SCHEDULED and none from then on; its ranks are of the world."""
    place = value.type.place
    if has_places(module.phase):
        if place is None:
            raise Problem(
                f"the type of %{value.name} has no place",
                f"say where it is, as in {value.type}@0",
                value,
            )
        check_ranks(place, module, f"%{value.name}", value)
    elif place is not None:
        raise Problem(
            f"the type of %{value.name} has a place, in a scheduled program",
            "a scheduled program is of one rank; leave the place out",
            value,
        )


def check_ranks(place: Place, module: Module, what: str, value: Value | None = None) -> None:
    """All ranks of a place are of the world."""
    for rank in place.ranks:
        if not 0 <= rank < module.world:
            raise Problem(
                f"{what} is at rank {rank}, the world has {module.world}",
                f"ranks are 0..{module.world - 1}",
                value,
            )


def check_op_places(op: Op, module: Module) -> None:
    """Operands are where the op runs, results where it makes them (before SCHEDULED)."""
    if isinstance(op, Transfer):
        return  # the one op that is for going from place to place
    if isinstance(op, Collective):
        _collective(op, module)
        return
    if isinstance(op, Return):
        if op.at is not None:
            check_ranks(op.at, module, "return")
    else:
        _one_place(op)
    if module.phase is Phase.TRACED and isinstance(op, _TAKE_FROM_ANYWHERE):
        return
    place = op.place
    if place is not None:
        for value in op.operands:
            _covers(value, place, op)


def _one_place(op: Op) -> None:
    """All results of an op are at one place, which is where it runs."""
    if isinstance(op, Call) and op.place is None:
        raise Problem(
            "a call with neither operands nor results is at no place",
            "let the function return unit, and give its result a place",
        )
    for value in op.results[1:]:
        if value.type.place != op.place:
            raise Problem(
                f"%{value.name} is at {value.type.place}, the op runs at {op.place}", "", value
            )


def _covers(value: Value, place: Place, op: Op) -> None:
    at = value.type.place
    if at is not place and at is not None and not at.covers(place):
        raise Problem(
            f"%{value.name} is at {at}, but {op.opcode} runs at {place}",
            "insert-transfers brings values to where they are used",
            value,
        )


def _collective(op: Collective, module: Module) -> None:
    check_ranks(op.group, module, op.opcode)
    members = [Place((rank,)) for rank in op.group.ranks]
    if isinstance(op, Broadcast):
        members_of_operands = [Place((op.root,))]
    else:
        members_of_operands = [] if isinstance(op, Barrier) else members
    if module.phase is not Phase.TRACED:
        for value, place in zip(op.operands, members_of_operands, strict=True):
            _covers(value, place, op)
    scattered = isinstance(op, ReduceScatter | AllToAll)
    for value, place in zip(op.results, members if scattered else [op.group], strict=True):
        if value.type.place != place:
            raise Problem(
                f"%{value.name} is at {value.type.place}, this {op.opcode} makes it at {place}",
                "",
                value,
            )
