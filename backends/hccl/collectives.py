"""Translate collectives into HCCL's calls, and name the function of each op."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from ...ir.attributes import ReduceOp
from ...ir.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Gather,
    Op,
    Recv,
    ReduceScatter,
    Scatter,
    Send,
)
from ...ir.types import DType, TensorType
from ..errors import BindError
from ..streams.collectives import (
    Collectives,
    Parts,
    Reduction,
    as_logic,
    does_not_reduce,
    same,
)
from ..streams.ports import maker
from .abi import CODES, REDUCTIONS
from .symbols import Symbols

NEEDS: dict[type[Op], str] = {
    Send: "HcclSend",
    Recv: "HcclRecv",
    AllReduce: "HcclAllReduce",
    ReduceScatter: "HcclReduceScatter",
    AllGather: "HcclAllGather",
    Broadcast: "HcclBroadcast",
    AllToAll: "HcclBatchSendRecv",
    Gather: "HcclBatchSendRecv",
    Scatter: "HcclBatchSendRecv",
    Barrier: "HcclAllGather",
}
"""The function that each op becomes."""


def check_supported(op: Op, symbols: Symbols) -> None:
    """Refuse an op that this version of HCCL has no function for.

    Raises:
        BindError: there is none; the message names it.
    """
    is_batched = isinstance(op, Send | Recv) and op.batch is not None
    name = "HcclBatchSendRecv" if is_batched else NEEDS[type(op)]
    if not symbols.has(name):
        description = f"`{op.opcode}` in a batch" if is_batched else f"`{op.opcode}`"
        raise BindError(
            f"{description} is not supported: HCCL in {symbols.path} has no {name}. Install a "
            "newer CANN, or let the value take another way by cg.via(x, 'cpu')"
        )


NATIVE = frozenset({DType.I8, DType.I16, DType.I32, DType.I64, DType.F16, DType.F32, DType.BF16})
"""The types that HCCL reduces on the A2 and A3 products."""

REDUCES = NATIVE | {DType.U8, DType.BOOL}
"""The types that are reduced by HCCL, some of them by way of another type."""


def reduction(op: ReduceOp, dtype: DType) -> Reduction:
    """The reduction of elements of a type.

    HCCL has no average; its products leave out two types; it reduces no unsigned numbers. Sums and
    products of bytes are those of signed bytes, bit by bit.

    Raises:
        BindError: HCCL does not reduce the type, or not in this way.
    """
    if dtype not in REDUCES:
        raise does_not_reduce("HCCL", dtype)
    if dtype is DType.BOOL and op is ReduceOp.AVG:
        raise BindError(f"HCCL does not average {dtype}: convert the operands to numbers")
    if dtype is DType.BOOL:
        return Reduction(as_logic(op), DType.I8, reads_bits=True)
    divides = op is ReduceOp.AVG
    op = ReduceOp.SUM if divides else op
    if dtype is DType.U8:
        if op in (ReduceOp.MAX, ReduceOp.MIN):
            return Reduction(op, DType.I16)
        return Reduction(op, DType.I8, reads_bits=True, divides=divides)
    if op is ReduceOp.PROD and dtype is DType.I16:
        return Reduction(op, DType.I32)
    if op is ReduceOp.PROD and dtype is DType.BF16:
        return Reduction(op, DType.F32)
    return Reduction(op, dtype, divides=divides)


class HcclCollectives(Collectives):
    """A collective in calls of HCCL. Broadcasts are in place; parts that stay here are copied."""

    codes: ClassVar[Mapping[DType, int]] = CODES
    numbers: ClassVar[Mapping[ReduceOp, int]] = REDUCTIONS
    sends_to_itself: ClassVar[bool] = False

    def reduction(self, op: ReduceOp, dtype: DType) -> Reduction:
        """The reduction of elements of a type."""
        return reduction(op, dtype)

    def _broadcast(self, op: Broadcast, type_: TensorType) -> Parts:
        """In place: the root first puts a copy of its operand where the result is to be."""
        root, nbytes = op.group.ranks.index(op.root), type_.nbytes

        def before(value: Any, result: Tensor) -> None:
            if self.line.member == root:
                result.copy_(value)

        def run(source: int, target: int) -> None:
            if nbytes:
                with self.line as comm:
                    self.library.broadcast(target, target, nbytes, root, comm, self.handle)

        return maker(type_, self.device), before, run, same
