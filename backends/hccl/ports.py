"""How collectives are put in terms of what HCCL has; messages are as with any library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ir.attributes import ReduceOp
from ...ir.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Collective,
    Op,
    Recv,
    ReduceScatter,
    Send,
)
from ...ir.types import DType, TensorType
from ..dtypes import TORCH_DTYPES
from ..errors import BindError
from ..nccl.ports import Collectives, Parts
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
    Barrier: "HcclAllGather",
}
"""The function that each op becomes."""


def check_supported(op: Op, symbols: Symbols) -> None:
    """Refuse an op that this version of HCCL has no function for.

    Raises:
        BindError: there is none; it is named.
    """
    name = NEEDS[type(op)]
    if not symbols.has(name):
        raise BindError(
            f"`{op.opcode}` is not supported: HCCL in {symbols.path} has no {name}. Install a "
            "newer CANN, or let the value take another way by cg.via(x, 'cpu')"
        )


@dataclass(frozen=True, slots=True)
class Reduction:
    """How HCCL reduces elements of a type.

    Attributes:
        op: HCCL's, by the IR's name.
        through: the type as which the elements are reduced.
        reads_bits: whether they are taken as they lie in memory, not converted.
        divides: whether the total is divided by the number of members after.
    """

    op: ReduceOp
    through: DType
    reads_bits: bool = False
    divides: bool = False


NATIVE = frozenset({DType.I8, DType.I16, DType.I32, DType.I64, DType.F16, DType.F32, DType.BF16})
"""What HCCL reduces on the A2 and A3 products."""

REDUCES = NATIVE | {DType.U8, DType.BOOL}
"""What is reduced by HCCL, some of it by way of another type."""


def reduction(op: ReduceOp, dtype: DType) -> Reduction:
    """How to reduce elements of a type.

    HCCL has no average; its products leave out two types; it reduces no unsigned numbers. Sums and
    products of bytes are those of signed bytes, bit by bit.

    Raises:
        BindError: HCCL does not reduce the type, or not in this way.
    """
    if dtype not in REDUCES:
        raise BindError(
            f"HCCL does not reduce {dtype}. Let the collective take another way, by switching "
            "'choose-transports' on, or convert the operands"
        )
    if dtype is DType.BOOL and op is ReduceOp.AVG:
        raise BindError(f"HCCL does not average {dtype}: convert the operands to numbers")
    if dtype is DType.BOOL:  # a sum of booleans is their disjunction, a product the conjunction
        op = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PROD: ReduceOp.MIN}.get(op, op)
        return Reduction(op, DType.I8, reads_bits=True)
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
    """See `Collectives`."""

    def _all_reduce(self, op: AllReduce, type_: TensorType) -> Parts:
        found = reduction(op.op, type_.dtype)
        count, code, number = type_.numel, CODES[found.through], REDUCTIONS[found.op]

        def run(source: int, target: int) -> None:
            if count:
                comm, queue = self.line.comm, self.queue
                self.library.all_reduce(source, target, count, code, number, comm, queue)

        up, down = self._through(found, type_.dtype)
        room = self._room(TensorType(found.through, type_.shape))
        return lambda value: up(value.contiguous()), room, run, down

    def _reduce_scatter(self, op: ReduceScatter, type_: TensorType) -> Parts:
        found = reduction(op.op, type_.dtype)
        count, code = type_.numel // self.members, CODES[found.through]
        number = REDUCTIONS[found.op]

        def run(source: int, target: int) -> None:
            if count:
                comm, queue = self.line.comm, self.queue
                self.library.reduce_scatter(source, target, count, code, number, comm, queue)

        up, down = self._through(found, type_.dtype)
        parts_first = self._parts_first(op.dim)
        shape = list(type_.shape)
        shape[op.dim] //= self.members
        room = self._room(TensorType(found.through, tuple(shape)))
        return lambda value: up(parts_first(value)), room, run, down

    def _through(
        self, found: Reduction, dtype: DType
    ) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """What makes the operand one that HCCL reduces, and the total one of the right type."""
        there, back, members = TORCH_DTYPES[found.through], TORCH_DTYPES[dtype], self.members

        def up(value: Tensor) -> Tensor:
            return value.view(there) if found.reads_bits else value.to(there)

        def down(total: Tensor) -> Tensor:
            total = total.view(back) if found.reads_bits else total.to(back)
            if not found.divides:
                return total
            if total.is_floating_point():
                return total / members
            return torch.div(total, members, rounding_mode="trunc")

        return up, down

    def _broadcast(self, op: Broadcast, type_: TensorType) -> Parts:
        """In place: the root first puts a copy of its operand where the result is to be."""
        root, nbytes = op.group.ranks.index(op.root), type_.nbytes
        room = self._room(type_)
        operand: list[Tensor] = []

        def up(value: Any) -> None:
            operand[:] = [value] if self.line.member == root else []

        def make() -> Tensor:
            made = room()
            if operand:
                made.copy_(operand.pop())
            return made

        def run(source: int, target: int) -> None:
            if nbytes:
                self.library.broadcast(target, target, nbytes, root, self.line.comm, self.queue)

        return up, make, run, _same

    def _all_to_all(self, op: AllToAll, type_: TensorType) -> Parts:
        """One batch with all other members; what stays here is copied, not sent."""
        shape = list(type_.shape)
        shape[op.dim] //= self.members
        parts = TensorType(type_.dtype, (self.members, *shape))
        nbytes, me = parts.nbytes // self.members, self.line.member
        parts_first, concatenated = self._parts_first(op.dim), self._concatenated(op.dim)
        room = self._room(parts)
        mine: list[Tensor] = []

        def up(value: Tensor) -> Tensor:
            there = parts_first(value)
            mine[:] = [there.view(parts.shape)[me]]
            return there

        def make() -> Tensor:
            made = room()
            made[me].copy_(mine.pop())
            return made

        def run(source: int, target: int) -> None:
            if nbytes and self.members > 1:
                others = ((i, i * nbytes) for i in range(self.members) if i != me)
                messages = [(i, source + at, target + at, nbytes) for i, at in others]
                self.library.exchange(messages, self.line.comm, self.queue)

        return up, make, run, concatenated

    def _room(self, type_: TensorType) -> Callable[[], Tensor]:
        dtype, shape, device = TORCH_DTYPES[type_.dtype], type_.shape, self.device
        return lambda: torch.empty(shape, dtype=dtype, device=device)


def _same(value: Tensor) -> Tensor:
    return value


__all__ = ["Collective", "HcclCollectives", "Reduction", "check_supported", "reduction"]
