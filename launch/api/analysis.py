"""Count the calls, messages and operations of a rank's program."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.module import Module
from ...ir.ops import Call, Collective, Recv, Send
from ...ir.types import FutureType, TensorType, Type


@dataclass(frozen=True, slots=True)
class Cost:
    """Counts of one rank's program; bytes are those of tensors, objects count as none.

    Attributes:
        ops: all of them.
        calls: of functions.
        flops: floating-point operations of traced functions, as `Function.flops` counts them.
        messages_sent, bytes_sent: point to point.
        messages_received, bytes_received: point to point.
        collectives: that the rank takes part in.
    """

    ops: int
    calls: int
    flops: int
    messages_sent: int
    bytes_sent: int
    messages_received: int
    bytes_received: int
    collectives: int


def cost_of(module: Module, rank: int) -> Cost:
    """Count what one rank of a scheduled module does."""
    ops = module.program_of(rank).ops
    calls = [op for op in ops if isinstance(op, Call)]
    sends = [op for op in ops if isinstance(op, Send)]
    receives = [op for op in ops if isinstance(op, Recv)]
    return Cost(
        ops=len(ops),
        calls=len(calls),
        flops=sum(module.functions[op.fn.name].flops.total for op in calls),
        messages_sent=len(sends),
        bytes_sent=sum(_nbytes(op.operands[0].type) for op in sends),
        messages_received=len(receives),
        bytes_received=sum(_nbytes(op.result.type) for op in receives),
        collectives=sum(isinstance(op, Collective) for op in ops),
    )


def _nbytes(type_: Type) -> int:
    value = type_.value if isinstance(type_, FutureType) else type_
    return value.nbytes if isinstance(value, TensorType) else 0
