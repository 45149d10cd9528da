"""Collectives over the lanes of their group: each member sends to all others, and reads in place.

What they compute is defined in `backends/virtual/collectives.py`; reductions run in group order on
every rank, so all ranks get the same bits. Each collective is a generator that yields while it has
to wait. The collectives of a channel run one after the other, which keeps the order of messages the
same on all lanes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....ir.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Collective,
    ReduceScatter,
)
from ....ir.types import TensorType, ValueType
from ...errors import BindError
from ...failures.interruptions import is_interruption
from ...failures.poison import Poison
from ...virtual.collectives import reduce, split
from ..memory.codecs import Codec, TensorCodec, UnitCodec, codec_of
from ..memory.parallel_memcpy import Copier
from .messages import Active, ReceiveLane, SendLane, incoming, outgoing

Steps = Generator[None, None, Any]

SPLIT_BYTES = 256 * 1024
"""All-reduces of more than this, on three ranks or more, reduce a part on each rank and then
exchange the parts: every byte is then added once, not once on each rank."""


class Fan:
    """One member's messages to all other members of the group."""

    def __init__(self, lanes: Sequence[SendLane], codec: Codec) -> None:
        self._pairs = [(lane, outgoing(codec)) for lane in lanes]

    def send(self, value: Any) -> None:
        """Start sending `value`, or the error that it is, to every other member."""
        for lane, message in self._pairs:
            if isinstance(value, Poison):
                message.fail(value)
            else:
                message.load(value)
            lane.push(message)

    @property
    def done(self) -> bool:
        """Whether `value` may be changed; makes progress."""
        finished = True
        for lane, message in self._pairs:
            if not message.done:
                lane.progress()
            finished = finished and message.done
        return finished


class Gathering:
    """One message from each of some other members, held in place until `release`."""

    def __init__(self, lanes: Mapping[int, ReceiveLane], codec: Codec) -> None:
        self._pairs = {rank: (lane, incoming(codec, hold=True)) for rank, lane in lanes.items()}

    def post(self) -> None:
        """Start receiving."""
        for lane, message in self._pairs.values():
            message.into = None
            lane.post(message)

    @property
    def done(self) -> bool:
        """Whether all messages are there; makes progress."""
        finished = True
        for lane, message in self._pairs.values():
            if not message.done:
                lane.progress()
            finished = finished and message.done
        return finished

    def take(self) -> dict[int, Any]:
        """The values by rank."""
        return {rank: message.take() for rank, (_, message) in self._pairs.items()}

    def release(self) -> None:
        """Let the senders overwrite the values."""
        for lane, message in self._pairs.values():
            if message.error is None:
                lane.release(message)


class Group:
    """The lanes between this rank and the other members of a channel's group.

    Attributes:
        rank: this rank.
        ranks: the members, in group order.
        out: lanes to the other members; one may serve several.
        into: lanes from the other members, by rank.
        copier: copies large payloads.
    """

    def __init__(
        self,
        rank: int,
        ranks: tuple[int, ...],
        out: Sequence[SendLane],
        into: Mapping[int, ReceiveLane],
        active: Active,
        copier: Copier,
    ) -> None:
        self.rank = rank
        self.copier = copier
        self.ranks = ranks
        self.out = out
        self.into = into
        self._active = active
        self._queue: deque[CollectivePort] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether no collective is under way."""
        return not self._queue

    def enter(self, port: CollectivePort) -> None:
        """Run a collective after those that entered before it."""
        self._queue.append(port)
        self._active[self] = None
        self.progress()

    def progress(self) -> None:
        """Run the collectives as far as they come."""
        queue = self._queue
        while queue and queue[0].advance():
            queue.popleft()
        if not queue:
            self._active.pop(self, None)

    def reset(self) -> None:
        """Forget all collectives."""
        self._queue.clear()
        self._active.pop(self, None)


class CollectivePort:
    """The port of one collective. Its result is the receiver's own."""

    def __init__(
        self,
        op: Collective,
        group: Group,
        operand: ValueType | None,
        result: ValueType,
    ) -> None:
        self._group = group
        self._algorithm = _algorithm(op, group, operand, result)
        self._steps: Steps | None = None
        self._value: Any = None
        self._done = False
        self._error: BaseException | None = None

    def start(self, value: Any) -> None:
        """See `Port`."""
        self._done = False
        self._error = None
        self._value = None
        self._steps = self._algorithm.run(value)
        self._group.enter(self)

    def fail(self, poison: Poison) -> None:
        """See `Port`."""
        self.start(poison)

    def poll(self) -> bool:
        """See `Port`."""
        if not self._done:
            self._group.progress()
        return self._done

    def take(self) -> Any:
        """See `Port`."""
        if self._error is not None:
            raise self._error
        value, self._value = self._value, None
        return value

    def release(self) -> None:
        """See `Port`."""

    def advance(self) -> bool:
        """Run until the next wait; returns whether the collective is over."""
        assert self._steps is not None
        try:
            next(self._steps)
        except StopIteration as end:
            self._value = end.value
        except BaseException as error:
            # Raised again by `take`, where the executor knows whose it is.
            if is_interruption(error):
                raise
            self._error = error
        else:
            return False
        self._steps = None
        self._done = True
        return True


class _Exchange:
    """Every member sends one value of a type to all, and gets everybody's."""

    def __init__(self, group: Group, codec: Codec) -> None:
        self._group = group
        self._fan = Fan(group.out, codec)
        self._gathering = Gathering(group.into, codec)

    def run(self, value: Any) -> Generator[None, None, list[Any]]:
        """Values in group order, those of others in place until `release`.

        Raises:
            Poison: some member has none; the same members learn of it in the same exchange.
        """
        self._gathering.post()
        self._fan.send(value)
        while not (self._fan.done & self._gathering.done):
            yield
        try:
            values = self._gathering.take()
            if isinstance(value, Poison):
                raise value
        except BaseException:  # also what is no Exception, from an object that is unpickled
            self.release()
            raise
        values[self._group.rank] = value
        return [values[rank] for rank in self._group.ranks]

    def release(self) -> None:
        """Give back the others' values."""
        self._gathering.release()


class _Barrier:
    def __init__(self, group: Group) -> None:
        self._exchange = _Exchange(group, UnitCodec())

    def run(self, value: Any) -> Steps:
        yield from self._exchange.run(value)
        self._exchange.release()


class _Broadcast:
    def __init__(self, group: Group, root: int, type_: ValueType) -> None:
        codec = codec_of(type_, group.copier)
        self._is_root = group.rank == root
        self._fan = Fan(group.out if self._is_root else (), codec)
        sources = {} if self._is_root else {root: group.into[root]}
        self._gathering = Gathering(sources, codec)
        self._root = root

    def run(self, value: Any) -> Steps:
        if self._is_root:
            self._fan.send(value)
            while not self._fan.done:
                yield
            if isinstance(value, Poison):
                raise value
            return value.clone() if isinstance(value, Tensor) else value
        self._gathering.post()
        while not self._gathering.done:
            yield
        try:
            received = self._gathering.take()[self._root]
            return received.clone() if isinstance(received, Tensor) else received
        finally:
            self._gathering.release()


class _Combine:
    """Collectives of one exchange: the result is a function of everybody's tensor."""

    def __init__(self, op: Collective, group: Group, operand: TensorType) -> None:
        self._op = op
        self._index = group.ranks.index(group.rank)
        self._exchange = _Exchange(group, TensorCodec(operand, group.copier))

    def run(self, value: Any) -> Steps:
        tensors = yield from self._exchange.run(value)
        result = self._combine(tensors)
        self._exchange.release()
        return result

    def _combine(self, tensors: list[Tensor]) -> Tensor:
        op, count, index = self._op, len(tensors), self._index
        if isinstance(op, AllReduce):
            return reduce(tensors, op.op)
        if isinstance(op, AllGather):
            return torch.cat(tensors, op.dim)
        assert isinstance(op, (ReduceScatter, AllToAll))
        parts = [split(tensor, count, op.dim)[index] for tensor in tensors]
        if isinstance(op, ReduceScatter):
            return reduce(parts, op.op)
        return torch.cat(parts, op.dim)


class _SplitAllReduce:
    """All-reduce in two exchanges: reduce the own part of everybody's, then gather the parts."""

    def __init__(self, op: AllReduce, group: Group, operand: TensorType) -> None:
        self._op = op.op
        self._shape = operand.shape
        count = len(group.ranks)
        self._part = -(-operand.numel // count)
        self._numel = operand.numel
        self._begin = group.ranks.index(group.rank) * self._part
        self._whole = _Exchange(group, TensorCodec(operand, group.copier))
        part = TensorType(operand.dtype, (self._part,))
        self._parts = _Exchange(group, TensorCodec(part, group.copier))

    def run(self, value: Any) -> Steps:
        tensors = yield from self._whole.run(value)
        mine = slice(self._begin, self._begin + self._part)
        part = reduce([tensor.reshape(-1)[mine] for tensor in tensors], self._op)
        self._whole.release()
        missing = self._part - part.numel()
        if missing:
            part = torch.cat([part, part.new_zeros(missing)])
        parts = yield from self._parts.run(part)
        result = torch.cat(parts)[: self._numel].view(self._shape)
        self._parts.release()
        return result


_Algorithm = _Barrier | _Broadcast | _Combine | _SplitAllReduce


def _algorithm(
    op: Collective, group: Group, operand: ValueType | None, result: ValueType
) -> _Algorithm:
    if isinstance(op, Barrier):
        return _Barrier(group)
    if isinstance(op, Broadcast):
        return _Broadcast(group, op.root, result)
    if not isinstance(operand, TensorType):
        raise BindError(f"`{op.opcode}` combines tensors, and its operand is {operand}")
    split_up = operand.nbytes > SPLIT_BYTES and len(group.ranks) > 2
    if isinstance(op, AllReduce) and split_up:
        return _SplitAllReduce(op, group, operand)
    return _Combine(op, group, operand)
