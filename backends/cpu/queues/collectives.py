"""Collectives over the lanes of their group, as their ops declare them.

Each sender sends to all receivers, which read in place. Reductions run in group order on every
rank, so all ranks get the same bits. Each collective is a generator that yields while it has to
wait. The collectives of a channel run one after the other, which keeps the order of messages the
same on all lanes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from ....ir.ops import Collective, Exchange
from ....ir.ops.rules import resized
from ....ir.types import TensorType, UnitType, ValueType
from ...errors import BindError
from ...failures.interruptions import is_interruption
from ...failures.poison import Poison
from ...virtual.collectives import combine, cut, reduce
from ..memory.codecs import Codec, codec_of
from ..memory.parallel_memcpy import Copier
from .messages import Active, Incoming, Outgoing, ReceiveLane, SendLane, incoming, outgoing

Steps = Generator[None, None, Any]

SPLIT_BYTES = 256 * 1024
"""All-reduces of more than this, on three ranks or more, reduce a part on each rank and then
exchange the parts: every byte is then added once, not once on each rank."""


@dataclass(frozen=True, slots=True)
class Outlet:
    """One lane of a member's, what goes by it, and whose part that is; None: whole operands."""

    lane: SendLane
    message: Outgoing
    part: int | None = None


class Fan:
    """One member's messages to other members of the group."""

    def __init__(self, exchange: Exchange, outlets: Sequence[Outlet]) -> None:
        self._exchange = exchange
        self._outlets = outlets

    def send(self, value: Any) -> None:
        """Start sending `value`, or the error that it is."""
        for outlet in self._outlets:
            if isinstance(value, Poison):
                outlet.message.fail(value)
            elif outlet.part is None:
                outlet.message.load(value)
            else:
                outlet.message.load(cut(self._exchange, value, outlet.part))
            outlet.lane.push(outlet.message)

    @property
    def done(self) -> bool:
        """Whether `value` may be changed; makes progress."""
        finished = True
        for outlet in self._outlets:
            if not outlet.message.done:
                outlet.lane.progress()
            finished = finished and outlet.message.done
        return finished


class Gathering:
    """One message from each of some other members, held in place until `release`."""

    def __init__(self, pairs: Mapping[int, tuple[ReceiveLane, Incoming]]) -> None:
        self._pairs = pairs

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
        near: those on this rank's machine, itself among them: one lane of each serves all others.
        out: lanes to the other members, each with the ranks that it serves.
        into: lanes from the other members, by rank.
        copier: copies large payloads.
    """

    def __init__(
        self,
        rank: int,
        ranks: tuple[int, ...],
        near: Set[int],
        out: Sequence[tuple[tuple[int, ...], SendLane]],
        into: Mapping[int, ReceiveLane],
        active: Active,
        copier: Copier,
    ) -> None:
        self.rank = rank
        self.copier = copier
        self.ranks = ranks
        self.near = near
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
    """One exchange of messages, and what this rank makes of those it gets.

    On one machine an operand is written once, whole, and all others there read it in place, those
    that need it not at all, too. To another machine goes what its receiver needs.

    Args:
        sent: the type of operands.
    """

    def __init__(self, exchange: Exchange, group: Group, sent: ValueType) -> None:
        self._exchange = exchange
        self._rank = group.rank
        self._near = group.near
        self._member = group.ranks.index(group.rank)
        self._receives = group.rank in exchange.receivers
        self._part = _part_of(exchange, sent)
        self._sent = sent
        self._copier = group.copier
        receivers = set(exchange.receivers)
        outlets = []
        for ranks, lane in group.out if group.rank in exchange.senders else ():
            if not receivers.isdisjoint(ranks):
                is_near = group.near >= set(ranks)
                part = None if is_near or exchange.cut is None else group.ranks.index(ranks[0])
                outlets.append(Outlet(lane, outgoing(self._codec(is_near)), part))
        self._fan = Fan(exchange, outlets)
        pairs = {}
        for source in exchange.senders:
            is_near = source in group.near
            served = group.near - {source} if is_near else {group.rank}
            if source != group.rank and not receivers.isdisjoint(served):
                message = incoming(self._codec(is_near), hold=True)
                pairs[source] = group.into[source], message
        self._gathering = Gathering(pairs)

    def _codec(self, whole: bool) -> Codec:
        return codec_of(self._sent if whole else self._part, self._copier)

    def run(self, value: Any) -> Steps:
        """What this rank gets, None if it receives nothing."""
        pieces = yield from self.pieces(value)
        result = combine(self._exchange, pieces) if self._receives else None
        self.release()
        return result

    def pieces(self, value: Any) -> Generator[None, None, list[Any]]:
        """This rank's piece of each sender's operand, those of others in place until `release`.

        Raises:
            Poison: some sender has none; the same receivers learn of it in the same exchange.
        """
        self._gathering.post()
        self._fan.send(value)
        while not (self._fan.done & self._gathering.done):
            yield
        try:
            values = self._gathering.take() if self._receives else {}
            if isinstance(value, Poison):
                raise value
        except BaseException:  # also what is no Exception, from an object that is unpickled
            self.release()
            raise
        values[self._rank] = value
        return [
            self._piece(rank, values[rank]) for rank in self._exchange.senders if rank in values
        ]

    def _piece(self, source: int, value: Any) -> Any:
        return cut(self._exchange, value, self._member) if source in self._near else value

    def release(self) -> None:
        """Give back the others' values."""
        self._gathering.release()


class _Barrier:
    """A unit of every member, for every member."""

    def __init__(self, group: Group) -> None:
        everyone = Exchange(group.ranks, group.ranks, group.ranks)
        self._exchange = _Exchange(everyone, group, UnitType())

    def run(self, value: Any) -> Steps:
        yield from self._exchange.pieces(value)
        self._exchange.release()


class _SplitAllReduce:
    """All-reduce in two exchanges: reduce the own part of everybody's, then gather the parts."""

    def __init__(self, exchange: Exchange, group: Group, operand: TensorType) -> None:
        assert exchange.reduce is not None, "an all-reduce reduces"
        self._op = exchange.reduce
        self._shape = operand.shape
        count = len(group.ranks)
        self._part = -(-operand.numel // count)
        self._numel = operand.numel
        self._begin = group.ranks.index(group.rank) * self._part
        self._whole = _Exchange(exchange, group, operand)
        part = TensorType(operand.dtype, (self._part,))
        self._parts = _Exchange(exchange, group, part)

    def run(self, value: Any) -> Steps:
        tensors = yield from self._whole.pieces(value)
        mine = slice(self._begin, self._begin + self._part)
        part = reduce([tensor.reshape(-1)[mine] for tensor in tensors], self._op)
        self._whole.release()
        missing = self._part - part.numel()
        if missing:
            part = torch.cat([part, part.new_zeros(missing)])
        parts = yield from self._parts.pieces(part)
        result = torch.cat(parts)[: self._numel].view(self._shape)
        self._parts.release()
        return result


def _part_of(exchange: Exchange, sent: ValueType) -> ValueType:
    """The type of a receiver's piece of an operand."""
    if exchange.cut is None or not isinstance(sent, TensorType):
        return sent
    return resized(sent, exchange.cut, sent.shape[exchange.cut] // len(exchange.members))


def _whole_of(exchange: Exchange, piece: ValueType) -> ValueType:
    """The type of an operand, by a receiver's piece of it."""
    if exchange.cut is None or not isinstance(piece, TensorType):
        return piece
    return resized(piece, exchange.cut, piece.shape[exchange.cut] * len(exchange.members))


def _algorithm(
    op: Collective, group: Group, operand: ValueType | None, result: ValueType
) -> _Barrier | _Exchange | _SplitAllReduce:
    exchange = op.exchange
    if not exchange.senders:
        return _Barrier(group)
    sent = operand if operand is not None else _whole_of(exchange, result)
    if exchange.is_whole:
        return _Exchange(exchange, group, sent)
    if not isinstance(sent, TensorType):
        raise BindError(f"`{op.opcode}` combines tensors, and its operand is {sent}")
    split_up = sent.nbytes > SPLIT_BYTES and len(group.ranks) > 2
    if exchange.reduce is not None and exchange.is_shared and split_up:
        return _SplitAllReduce(exchange, group, sent)
    return _Exchange(exchange, group, sent)
