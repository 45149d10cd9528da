"""The ports of messages and collectives on streams: counts are fixed when they are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...ir.attributes import ReduceOp, Stream
from ...ir.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Collective,
    ReduceScatter,
)
from ...ir.types import DType, TensorType, ValueType
from ..dtypes import TORCH_DTYPES
from ..errors import BindError
from ..poison import Poison
from .library import CODES, REDUCTIONS, Library
from .pool import Line


class _Port:
    """What the ports share."""

    stream: Stream

    def __init__(self, stream: Stream, queue: int, library: Library, line: Line) -> None:
        self.stream = stream
        self._queue = queue
        self._library = library
        self._line = line

    def must_prepare(self, value: Any) -> bool:
        """See `StreamPort`."""
        return True

    def fail(self, poison: Poison) -> NoReturn:
        """See `StreamPort`."""
        raise poison

    def poll(self) -> bool:
        """See `StreamPort`."""
        return True

    def release(self) -> None:
        """See `StreamPort`."""


class SendPort(_Port):
    """Sends a tensor's bytes."""

    holds = False

    def __init__(
        self, queue: int, library: Library, line: Line, type_: TensorType, stream: Stream
    ) -> None:
        super().__init__(stream, queue, library, line)
        self._nbytes = type_.nbytes
        self._held: Tensor | None = None

    def must_prepare(self, value: Tensor) -> bool:
        """See `StreamPort`."""
        return not value.is_contiguous()

    def prepare(self, value: Tensor) -> Tensor:
        """See `StreamPort`."""
        self._held = value.contiguous()
        return self._held

    def start(self, value: Tensor) -> None:
        """See `StreamPort`."""
        if self._nbytes:
            self._library.send(value.data_ptr(), self._nbytes, 1, self._line.comm, self._queue)

    def take(self) -> None:
        """A send makes no value."""


class RecvPort(_Port):
    """Receives a tensor's bytes, into a slot of its channel or into memory of its own.

    Args:
        slot: the slot's tensor; None where the op has no slot.
    """

    def __init__(
        self,
        queue: int,
        library: Library,
        line: Line,
        type_: TensorType,
        stream: Stream,
        slot: Tensor | None,
        device: torch.device,
    ) -> None:
        super().__init__(stream, queue, library, line)
        self._nbytes = type_.nbytes
        self._slot = slot
        self._make = _maker(type_, device)
        self._value: Tensor | None = None
        self.holds = slot is not None

    def must_prepare(self, value: Tensor | None) -> bool:
        """See `StreamPort`."""
        return self._slot is None

    def prepare(self, value: Tensor | None) -> Tensor:
        """See `StreamPort`."""
        return self._make() if value is None else value

    def start(self, value: Tensor | None) -> None:
        """See `StreamPort`."""
        into = self._slot if value is None else value
        assert into is not None, "without a slot, `prepare` takes memory"
        self._value = into
        if self._nbytes:
            self._library.recv(into.data_ptr(), self._nbytes, 0, self._line.comm, self._queue)

    def take(self) -> Tensor | None:
        """See `StreamPort`."""
        value, self._value = self._value, None
        return value


class CollectivePort(_Port):
    """A collective. Its result is in memory of its own."""

    holds = False

    def __init__(
        self,
        queue: int,
        library: Library,
        line: Line,
        stream: Stream,
        shape_up: Callable[[Any], Tensor | None],
        room: Callable[[], Tensor],
        run: Callable[[int, int], None],
        shape_down: Callable[[Tensor], Any],
    ) -> None:
        super().__init__(stream, queue, library, line)
        self._shape_up = shape_up
        self._room = room
        self._run = run
        self._shape_down = shape_down
        self._operand: Tensor | None = None
        self._result: Tensor | None = None

    def prepare(self, value: Any) -> Any:
        """See `StreamPort`."""
        self._operand = self._shape_up(value)
        self._result = self._room()
        return value

    def start(self, value: Any) -> None:
        """See `StreamPort`."""
        assert self._result is not None
        source = self._result if self._operand is None else self._operand
        self._run(source.data_ptr(), self._result.data_ptr())

    def take(self) -> Any:
        """See `StreamPort`; what has to be put in order is so on the compute stream."""
        result, self._result = self._result, None
        assert result is not None
        return self._shape_down(result)


def collective_port(
    op: Collective,
    line: Line,
    operand: ValueType | None,
    result: ValueType,
    library: Library,
    queue: int,
    stream: Stream,
    device: torch.device,
) -> CollectivePort:
    """The port of a collective.

    NCCL puts parts one behind the other; along any other dimension than the first, parts are put in
    order before or after, on the compute stream.

    Raises:
        BindError: NCCL does not know the op for the operand's type.
    """
    make = Collectives(op, line, operand, result, library, queue, device)
    shape_up, room, run, shape_down = make.parts()
    return CollectivePort(queue, library, line, stream, shape_up, room, run, shape_down)


Parts = tuple[
    Callable[[Any], Tensor | None],
    Callable[[], Tensor],
    Callable[[int, int], None],
    Callable[[Tensor], Any],
]


class Collectives:
    """Chooses what a collective does before, with NCCL, and after."""

    def __init__(
        self,
        op: Collective,
        line: Line,
        operand: ValueType | None,
        result: ValueType,
        library: Library,
        queue: int,
        device: torch.device,
    ) -> None:
        self.op = op
        self.line = line
        self.result = result
        self.library = library
        self.queue = queue
        self.device = device
        self.members = len(line.group.ranks)
        self.operand = operand

    def parts(self) -> Parts:
        """Before, memory for the result, the call, after."""
        op = self.op
        if isinstance(op, Barrier):
            token, room = torch.zeros(2, self.members, dtype=torch.uint8, device=self.device)
            return lambda value: token, lambda: room, self._gather(1), _nothing
        if isinstance(op, Broadcast):
            return self._broadcast(op, _tensor(op, self.result))
        operand = _tensor(op, self.operand)
        if isinstance(op, AllReduce):
            return self._all_reduce(op, operand)
        if isinstance(op, AllGather):
            return self._all_gather(op, operand)
        if isinstance(op, ReduceScatter):
            return self._reduce_scatter(op, operand)
        if isinstance(op, AllToAll):
            return self._all_to_all(op, operand)
        raise BindError(f"NCCL does not know `{op.opcode}`")

    def _broadcast(self, op: Broadcast, type_: TensorType) -> Parts:
        root, nbytes = op.group.ranks.index(op.root), type_.nbytes

        def run(source: int, target: int) -> None:
            if nbytes:
                self.library.broadcast(source, target, nbytes, root, self.line.comm, self.queue)

        is_root = self.line.member == root
        return _dense if is_root else _nothing, _maker(type_, self.device), run, _same

    def _all_reduce(self, op: AllReduce, type_: TensorType) -> Parts:
        code, count, after = self._reduction(op.op, type_)

        def run(source: int, target: int) -> None:
            if count:
                comm, queue = self.line.comm, self.queue
                self.library.all_reduce(source, target, count, CODES[code[0]], code[1], comm, queue)

        return _dense, _maker(type_, self.device), run, after

    def _reduce_scatter(self, op: ReduceScatter, type_: TensorType) -> Parts:
        code, count, after = self._reduction(op.op, type_)
        count //= self.members

        def run(source: int, target: int) -> None:
            if count:
                comm, queue = self.line.comm, self.queue
                self.library.reduce_scatter(
                    source, target, count, CODES[code[0]], code[1], comm, queue
                )

        part = _tensor(op, self.result)
        return self._parts_first(op.dim), _maker(part, self.device), run, after

    def _all_gather(self, op: AllGather, type_: TensorType) -> Parts:
        parts = TensorType(type_.dtype, (self.members, *type_.shape))
        return (
            _dense,
            _maker(parts, self.device),
            self._gather(type_.nbytes),
            self._concatenated(op.dim),
        )

    def _all_to_all(self, op: AllToAll, type_: TensorType) -> Parts:
        shape = list(type_.shape)
        shape[op.dim] //= self.members
        parts = TensorType(type_.dtype, (self.members, *shape))
        nbytes = parts.nbytes // self.members

        def run(source: int, target: int) -> None:
            if nbytes:
                steps = ((i, i * nbytes) for i in range(self.members))
                messages = [(i, source + at, target + at, nbytes) for i, at in steps]
                self.library.exchange(messages, self.line.comm, self.queue)

        return (
            self._parts_first(op.dim),
            _maker(parts, self.device),
            run,
            self._concatenated(op.dim),
        )

    def _gather(self, nbytes: int) -> Callable[[int, int], None]:
        def run(source: int, target: int) -> None:
            if nbytes:
                self.library.all_gather(source, target, nbytes, self.line.comm, self.queue)

        return run

    def _parts_first(self, dim: int) -> Callable[[Tensor], Tensor]:
        """Puts the parts of a tensor along `dim` one behind the other."""
        members = self.members
        if dim == 0:
            return _dense
        return lambda value: torch.stack(value.chunk(members, dim))

    def _concatenated(self, dim: int) -> Callable[[Tensor], Tensor]:
        """Puts parts that stand one behind the other side by side along `dim`."""
        if dim == 0:
            return lambda parts: parts.flatten(0, 1)
        return lambda parts: torch.cat(parts.unbind(0), dim)

    def _reduction(
        self, op: ReduceOp, type_: TensorType
    ) -> tuple[tuple[DType, int], int, Callable[[Tensor], Tensor]]:
        """NCCL's element type and op, the number of elements, and what comes after."""
        dtype, after = type_.dtype, _same
        if dtype not in CODES:
            raise BindError(
                f"NCCL does not reduce {dtype}. Let the collective take another way, by switching "
                "'choose-transports' on, or convert the operands"
            )
        if dtype is DType.BOOL:  # a sum of booleans is their disjunction, a product the conjunction
            op = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PROD: ReduceOp.MIN}.get(op, op)
        if op is ReduceOp.AVG and dtype.value[0] in "iu":
            members = self.members
            return (
                (dtype, REDUCTIONS[ReduceOp.SUM]),
                type_.numel,
                lambda total: torch.div(total, members, rounding_mode="trunc"),
            )
        return (dtype, REDUCTIONS[op]), type_.numel, after


def _maker(type_: TensorType, device: torch.device) -> Callable[[], Tensor]:
    dtype, shape = TORCH_DTYPES[type_.dtype], type_.shape
    return lambda: torch.empty(shape, dtype=dtype, device=device)


def _tensor(op: Collective, type_: ValueType | None) -> TensorType:
    if not isinstance(type_, TensorType):
        raise BindError(
            f"`{op.opcode}` of {type_} cannot go by NCCL, which moves tensors between GPUs"
        )
    return type_


def _dense(value: Tensor) -> Tensor:
    return value.contiguous()


def _same(value: Tensor) -> Tensor:
    return value


def _nothing(value: Any) -> None:
    return None
