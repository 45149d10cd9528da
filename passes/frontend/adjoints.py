"""How cotangents pass backwards through the ops that are not calls.

A value that several ranks hold is one value of the step, not one for each rank: its cotangent is
the sum over all its uses on all ranks. So the cotangent of an operand of `all_reduce` is that of
the result, and the cotangent of an operand of `all_gather` is its part of that of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...ir.attributes import ReduceOp
from ...ir.diagnostics import error
from ...ir.module import Program
from ...ir.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Copy,
    Op,
    ReduceScatter,
    Transfer,
    Value,
    View,
)
from ...ir.types import Place, TensorType, relocate
from .cotangents import Cotangents


def pull_back(op: Op, program: Program, cotangents: Cotangents) -> list[tuple[Value, Value]]:
    """The cotangents of an op's operands, as pairs (operand, cotangent), from its results'.

    Raises:
        IRError: the gradient of such an op is not known.
    """
    rule = _RULES.get(type(op))
    if rule is None:
        raise error(
            f"the gradient of {op.opcode} is not known",
            op=op,
            program=program,
            help=_REMEDIES.get(type(op), "take this value out of the loss"),
        )
    if isinstance(op, (AllReduce, ReduceScatter)) and op.op is not ReduceOp.SUM:
        raise error(
            f"the gradient of {op.opcode} is known for 'sum' alone, not for '{op.op.value}'",
            op=op,
            program=program,
            help="reduce with 'sum', and do the rest in an actor's method",
        )
    return rule(op, cotangents)


def _same(op: Op, cotangents: Cotangents) -> list[tuple[Value, Value]]:
    total = cotangents.total(op.result, op)
    return [(operand, total) for operand in op.operands]


def _likewise(op: Transfer, cotangents: Cotangents) -> list[tuple[Value, Value]]:
    """The cotangent travels as the value did."""
    total = cotangents.total(op.result, op)
    made = cotangents.new(op.operands[0], total.type)
    cotangents.ops.append(Transfer((total,), (made,), via=op.via, loc=op.loc, mb=op.mb))
    return [(op.operands[0], made)]


def _part(op: AllGather, cotangents: Cotangents) -> list[tuple[Value, Value]]:
    total = cotangents.total(op.result, op)
    held = total.type.place
    found, start = [], 0
    for operand, rank in zip(op.operands, op.group.ranks, strict=True):
        type_ = operand.type
        assert isinstance(type_, TensorType), "only tensors are gathered"
        length = type_.shape[op.dim]
        # Where the whole is not at hand, the part is cut off first: it is less to send.
        place = Place.of(rank if held is None or rank in held else min(held.ranks))
        part = cotangents.new(operand, relocate(type_, place))
        cotangents.ops.append(
            View((total,), (part,), dim=op.dim, start=start, length=length, loc=op.loc, mb=op.mb)
        )
        found.append((operand, part))
        start += length
    return found


def _gather(op: ReduceScatter, cotangents: Cotangents) -> list[tuple[Value, Value]]:
    totals = _totals(op, cotangents)
    whole = cotangents.new(op.operands[0], relocate(op.operands[0].type, op.group))
    cotangents.ops.append(
        AllGather(totals, (whole,), group=op.group, dim=op.dim, loc=op.loc, mb=op.mb)
    )
    return [(operand, whole) for operand in op.operands]


def _exchange(op: AllToAll, cotangents: Cotangents) -> list[tuple[Value, Value]]:
    totals = _totals(op, cotangents)
    back = tuple(cotangents.new(operand, operand.type) for operand in op.operands)
    cotangents.ops.append(AllToAll(totals, back, group=op.group, dim=op.dim, loc=op.loc, mb=op.mb))
    return list(zip(op.operands, back, strict=True))


def _totals(op: Collective, cotangents: Cotangents) -> tuple[Value, ...]:
    """The cotangents of all results; a result that no loss uses has a zero one."""
    return tuple(
        cotangents.total(result, op)
        if cotangents.has(result)
        else cotangents.fill(result, 0.0, result.type.place, op)
        for result in op.results
    )


_RULES: dict[type[Op], Callable[[Any, Cotangents], list[tuple[Value, Value]]]] = {
    Copy: _same,
    Transfer: _likewise,
    Broadcast: _same,
    AllReduce: _same,
    AllGather: _part,
    ReduceScatter: _gather,
    AllToAll: _exchange,
}
_REMEDIES: dict[type[Op], str] = {
    View: "split inputs of the step into microbatches, or slice the value with a torch operation",
}
