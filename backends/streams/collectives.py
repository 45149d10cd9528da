"""Make collectives of a library's calls: prepare operands before a call, and results after it.

Libraries lay parts one behind the other. For parts along another dimension than the first, the
compute stream reorders the operand before the call, or the result after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

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
    Gather,
    ReduceScatter,
    Scatter,
)
from ...ir.types import DType, TensorType, ValueType
from ..dtypes import TORCH_DTYPES
from ..errors import BindError
from .groups import Line
from .library import RawMessage
from .pool import Pool
from .ports import maker

Parts = tuple[
    Callable[[], Tensor],
    Callable[[Any, Tensor], Tensor | None],
    Callable[[int, int], None],
    Callable[[Tensor], Any],
]
"""Four functions: take memory for the result; prepare the operand, which may use that memory; call
the library with the pointers of both; make the value from the result."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction in terms of a library.

    Attributes:
        op: of the library, by the IR's name.
        through: the element type in which the library reduces.
        reads_bits: True to read elements as bits of that type, False to convert them.
        divides: whether the total is divided by the number of members afterwards.
    """

    op: ReduceOp
    through: DType
    reads_bits: bool = False
    divides: bool = False


class Collectives(ABC):
    """One collective in terms of a library; a subclass says what it reduces.

    Args:
        handle: the stream as the library takes it.

    Attributes:
        codes, numbers: the library's own numbers for element types and for reductions.
        sends_to_itself: whether a member's part of its own tensor may be a message of a batch;
            otherwise the part is copied.
    """

    codes: ClassVar[Mapping[DType, int]]
    numbers: ClassVar[Mapping[ReduceOp, int]]
    sends_to_itself: ClassVar[bool] = True

    def __init__(
        self,
        op: Collective,
        line: Line,
        operand: ValueType | None,
        result: ValueType,
        pool: Pool,
        handle: Any,
    ) -> None:
        self.op = op
        self.line = line
        self.result = result
        self.pool = pool
        self.library = pool.library
        self.handle = handle
        self.device = pool.device.torch_device
        self.members = len(line.group.ranks)
        self.operand = operand

    @abstractmethod
    def reduction(self, op: ReduceOp, dtype: DType) -> Reduction:
        """The library's reduction of elements of a type.

        Raises:
            BindError: the library does not reduce the type, or not in this way.
        """

    def parts(self) -> Parts:
        """The functions of the collective; see `Parts`.

        Raises:
            BindError: the library does not know the op for the operand's type.
        """
        op = self.op
        if isinstance(op, Barrier):
            token, room = torch.zeros(2, self.members, dtype=torch.uint8, device=self.device)
            return lambda: room, lambda *_: token, self._all_gathers(1), nothing
        if isinstance(op, Broadcast):
            return self._broadcast(op, self._tensor(self.result))
        if isinstance(op, Scatter):
            return self._scatter(op, self._tensor(self.result))
        operand = self._tensor(self.operand)  # every member gives one to the ops below
        if isinstance(op, AllReduce):
            return self._all_reduce(op, operand)
        if isinstance(op, AllGather):
            return self._all_gather(op, operand)
        if isinstance(op, Gather):
            return self._gather(op, operand)
        if isinstance(op, ReduceScatter):
            return self._reduce_scatter(op, operand)
        if isinstance(op, AllToAll):
            return self._all_to_all(op, operand)
        raise BindError(f"{self.pool.library_name} does not know `{op.opcode}`")

    def _broadcast(self, op: Broadcast, type_: TensorType) -> Parts:
        root, nbytes = op.group.ranks.index(op.root), type_.nbytes

        def run(source: int, target: int) -> None:
            if nbytes:
                with self.line as comm:
                    self.library.broadcast(source, target, nbytes, root, comm, self.handle)

        before = dense if self.line.member == root else nothing
        return maker(type_, self.device), before, run, same

    def _all_reduce(self, op: AllReduce, type_: TensorType) -> Parts:
        reduction = self.reduction(op.op, type_.dtype)
        count, code, number = type_.numel, self.codes[reduction.through], self.numbers[reduction.op]

        def run(source: int, target: int) -> None:
            if count:
                handle = self.handle
                with self.line as comm:
                    self.library.all_reduce(source, target, count, code, number, comm, handle)

        up, down = self._through(reduction, type_.dtype)
        room = maker(TensorType(reduction.through, type_.shape), self.device)
        return room, lambda value, _: up(value.contiguous()), run, down

    def _reduce_scatter(self, op: ReduceScatter, type_: TensorType) -> Parts:
        reduction = self.reduction(op.op, type_.dtype)
        code, number = self.codes[reduction.through], self.numbers[reduction.op]
        count = type_.numel // self.members

        def run(source: int, target: int) -> None:
            if count:
                handle = self.handle
                with self.line as comm:
                    self.library.reduce_scatter(source, target, count, code, number, comm, handle)

        up, down = self._through(reduction, type_.dtype)
        parts_first = self._parts_first(op.dim)
        room = maker(TensorType(reduction.through, self._part(type_, op.dim)), self.device)
        return room, lambda value, _: up(parts_first(value)), run, down

    def _all_gather(self, op: AllGather, type_: TensorType) -> Parts:
        parts = TensorType(type_.dtype, (self.members, *type_.shape))
        room = maker(parts, self.device)
        return room, dense, self._all_gathers(type_.nbytes), self._concatenated(op.dim)

    def _all_to_all(self, op: AllToAll, type_: TensorType) -> Parts:
        parts = TensorType(type_.dtype, (self.members, *self._part(type_, op.dim)))
        nbytes, me = parts.nbytes // self.members, self.line.member
        parts_first = self._parts_first(op.dim)
        peers = [i for i in range(self.members) if self.sends_to_itself or i != me]

        def before(value: Tensor, result: Tensor) -> Tensor:
            ordered = parts_first(value)
            if not self.sends_to_itself:
                result[me].copy_(ordered.view(parts.shape)[me])
            return ordered

        def run(source: int, target: int) -> None:
            self._batch(
                RawMessage(receives, peer, pointer + peer * nbytes, nbytes)
                for peer in peers
                for receives, pointer in ((False, source), (True, target))
            )

        return maker(parts, self.device), before, run, self._concatenated(op.dim)

    def _gather(self, op: Gather, type_: TensorType) -> Parts:
        """The root receives from all others; its own tensor is copied, not sent."""
        root, me, nbytes = op.group.ranks.index(op.root), self.line.member, type_.nbytes

        def send(source: int, target: int) -> None:
            self._batch([RawMessage(False, root, source, nbytes)])

        def receive(source: int, target: int) -> None:
            self._batch(self._of_others(True, target, nbytes))

        if me != root:
            return maker(TensorType(DType.U8, (0,)), self.device), dense, send, nothing
        parts = TensorType(type_.dtype, (self.members, *type_.shape))

        def before(value: Tensor, result: Tensor) -> None:
            result[me].copy_(value)

        return maker(parts, self.device), before, receive, self._concatenated(op.dim)

    def _scatter(self, op: Scatter, part: TensorType) -> Parts:
        """The root sends to all others; its own part is copied, not sent."""
        root, me, nbytes = op.group.ranks.index(op.root), self.line.member, part.nbytes
        parts_first = self._parts_first(op.dim)

        def before(value: Tensor, result: Tensor) -> Tensor:
            parts = parts_first(value).view(self.members, *part.shape)
            result.copy_(parts[me])
            return parts

        def send(source: int, target: int) -> None:
            self._batch(self._of_others(False, source, nbytes))

        def receive(source: int, target: int) -> None:
            self._batch([RawMessage(True, root, target, nbytes)])

        room = maker(part, self.device)
        return (room, before, send, same) if me == root else (room, nothing, receive, same)

    def _batch(self, messages: Iterable[RawMessage]) -> None:
        """Send and receive those messages that are not empty."""
        nonempty = [message for message in messages if message.nbytes]
        if nonempty:
            with self.line as comm:
                self.library.batch(nonempty, comm, self.handle)

    def _of_others(self, receives: bool, pointer: int, nbytes: int) -> list[RawMessage]:
        """A message with each other member; their parts stand one behind the other."""
        peers = (peer for peer in range(self.members) if peer != self.line.member)
        return [RawMessage(receives, peer, pointer + peer * nbytes, nbytes) for peer in peers]

    def _all_gathers(self, nbytes: int) -> Callable[[int, int], None]:
        def run(source: int, target: int) -> None:
            if nbytes:
                with self.line as comm:
                    self.library.all_gather(source, target, nbytes, comm, self.handle)

        return run

    def _through(
        self, reduction: Reduction, dtype: DType
    ) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """Convert the operand for the library's reduction, and the total back: two functions."""
        reduced_type, result_type, members = (
            TORCH_DTYPES[reduction.through],
            TORCH_DTYPES[dtype],
            self.members,
        )

        def up(value: Tensor) -> Tensor:
            return value.view(reduced_type) if reduction.reads_bits else value.to(reduced_type)

        def down(total: Tensor) -> Tensor:
            total = total.view(result_type) if reduction.reads_bits else total.to(result_type)
            if not reduction.divides:
                return total
            if total.is_floating_point():
                return total / members
            return torch.div(total, members, rounding_mode="trunc")

        return up, down

    def _part(self, type_: TensorType, dim: int) -> tuple[int, ...]:
        """The shape of one member's part along `dim`."""
        shape = list(type_.shape)
        shape[dim] //= self.members
        return tuple(shape)

    def _parts_first(self, dim: int) -> Callable[[Tensor], Tensor]:
        """A function that puts the parts of a tensor along `dim` one behind the other."""
        members = self.members
        if dim == 0:
            return lambda value: value.contiguous()
        return lambda value: torch.stack(value.chunk(members, dim))

    def _concatenated(self, dim: int) -> Callable[[Tensor], Tensor]:
        """A function that joins parts that stand one behind the other along `dim`."""
        if dim == 0:
            return lambda parts: parts.flatten(0, 1)
        return lambda parts: torch.cat(parts.unbind(0), dim)

    def _tensor(self, type_: ValueType | None) -> TensorType:
        if not isinstance(type_, TensorType):
            raise BindError(
                f"`{self.op.opcode}` of {type_} cannot go by {self.pool.library_name}, which moves "
                f"tensors between {self.pool.device_name}s"
            )
        return type_


def does_not_reduce(library: str, dtype: DType) -> BindError:
    """The error for a type that a library does not reduce."""
    return BindError(
        f"{library} does not reduce {dtype}. Let the collective take another way, by switching "
        "'choose-transports' on, or convert the operands"
    )


def as_logic(op: ReduceOp) -> ReduceOp:
    """The reduction for booleans: a sum is their disjunction, a product their conjunction."""
    return {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PROD: ReduceOp.MIN}.get(op, op)


def dense(value: Tensor, _: Tensor) -> Tensor:
    """The operand's elements one behind the other."""
    return value.contiguous()


def same(value: Tensor) -> Tensor:
    """The value itself."""
    return value


def nothing(*_: Any) -> None:
    """No value."""
    return
