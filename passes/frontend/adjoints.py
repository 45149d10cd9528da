"""Pull cotangents back through the ops that are not calls, as each op class declares.

A value that several ranks hold is one value of the step, not one for each rank. Its cotangent is
the sum over all uses on all ranks. So an operand of `all_reduce` has the cotangent of the result,
and an operand of `all_gather` has its part of the result's cotangent.
"""

from __future__ import annotations

from dataclasses import replace

from ...ir.attributes import ReduceOp
from ...ir.layout import Layout
from ...ir.ops import Adjoint, AllGather, Collective, Op, Transfer, Value, View
from ...ir.ops.module import Program
from ...ir.text.diagnostics import error
from ...ir.types import Place, TensorType, Type, UnitType, relocate
from .cotangents import Cotangents

Pairs = list[tuple[Value, Value]]


def pull_back(op: Op, program: Program, cotangents: Cotangents) -> Pairs:
    """The cotangents of an op's operands, from those of its results, as pairs (operand, cotangent).

    Raises:
        IRError: the gradient of this op is not known.
    """
    if op.adjoint is None:
        raise error(
            f"the gradient of {op.opcode} is not known",
            op=op,
            program=program,
            help=op.gradient_help,
        )
    if isinstance(op, Collective) and op.exchange.reduce not in (None, ReduceOp.SUM):
        assert op.exchange.reduce is not None
        raise error(
            f"the gradient of {op.opcode} is known for 'sum' alone, not for "
            f"'{op.exchange.reduce.value}'",
            op=op,
            program=program,
            help="reduce with 'sum', and do the rest in an actor's method",
        )
    if op.adjoint is Adjoint.TRANSPOSE:
        assert isinstance(op, Collective), "collectives alone have a transpose"
        return _transpose(op, cotangents)
    if op.adjoint is Adjoint.PART:
        assert isinstance(op, AllGather), "nothing else puts parts together"
        return _parts(op, cotangents)
    total = cotangents.total(op.result, op)
    if op.adjoint is Adjoint.TRAVELS:
        assert isinstance(op, Transfer), "nothing else travels"
        if op.experts is not None:
            raise error(
                "the gradient of a transfer of rows is not known outside of a method",
                op=op,
                program=program,
                help="leave out experts and ids; a method's derivative has transfers of its own",
            )
        cotangent = cotangents.new(op.operands[0], _returning(op, total.type))
        cotangents.ops.append(Transfer((total,), (cotangent,), via=op.via, loc=op.loc, mb=op.mb))
        total = cotangent
    return [(operand, total) for operand in op.operands]


def _returning(op: Transfer, held: Type) -> Type:
    """The type of the cotangent of a transfer's operand.

    The cotangent of a plain copy stays where it is. That of a laid-out operand goes back to the
    operand's layout, without summands: each rank with a summand gets the whole sum's cotangent.
    """
    primal = op.operands[0].type
    if not isinstance(primal, TensorType) or not (primal.layout or op.changes_layout):
        return held
    cuts = primal.layout.cuts if primal.layout is not None else ()
    return replace(primal, layout=Layout.of(cuts))


def _parts(op: AllGather, cotangents: Cotangents) -> Pairs:
    total = cotangents.total(op.result, op)
    held = total.type.place
    pairs, start = [], 0
    for operand, rank in zip(op.operands, op.group.ranks, strict=True):
        type_ = operand.type
        assert isinstance(type_, TensorType), "only tensors are gathered"
        length = type_.shape[op.dim]
        # If the rank does not have the whole, the part is cut off first, as it is less to send.
        place = Place.of(rank if held is None or rank in held else min(held.ranks))
        part = cotangents.new(operand, relocate(type_, place))
        cotangents.ops.append(
            View((total,), (part,), dim=op.dim, start=start, length=length, loc=op.loc, mb=op.mb)
        )
        pairs.append((operand, part))
        start += length
    return pairs


def _transpose(op: Collective, cotangents: Cotangents) -> Pairs:
    """Receivers send the cotangents of their results; senders get those of their operands."""
    exchange = op.exchange
    totals = []
    for value, place in zip(op.results, op.result_places, strict=True):
        if place.rank not in exchange.receivers:
            continue
        # A result that no loss uses has a zero cotangent.
        known = cotangents.has(value)
        total = cotangents.total(value, op) if known else cotangents.fill(value, 0.0, place, op)
        totals.append(total)
    operands = dict(zip(exchange.senders, op.operands, strict=True))
    back = op.transposed(tuple(totals))
    results = []
    for place in back.result_places:
        operand = operands.get(place.ranks[0])
        results.append(
            cotangents.new(op.operands[0], UnitType(place))
            if operand is None
            else cotangents.new(operand, relocate(operand.type, place))
        )
    back.results, back.loc, back.mb = tuple(results), op.loc, op.mb
    cotangents.ops.append(back)
    if back.exchange.is_shared:
        return [(operand, back.result) for operand in op.operands]
    of_rank = dict(zip(exchange.members, results, strict=True))
    return [(operand, of_rank[rank]) for rank, operand in operands.items()]
