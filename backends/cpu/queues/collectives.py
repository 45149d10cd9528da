"""Collectives over the queues of their group, as their ops declare them.

Each sender sends to all receivers, which read in place. Reductions run in group order on every
rank, so all ranks get the same bits. Each collective is a generator that yields while it has to
wait. The collectives of a channel send their messages one after the other, which keeps the order of
messages the same on all queues, and leave their queue so, though one may be done before another.
Small messages do not wait for the collective before to end, only for its messages to be sent. Large
ones do, as each in flight takes shared memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from ....ir.ops import AllReduce, Collective, Exchange
from ....ir.ops.rules import resized
from ....ir.types import TensorType, UnitType, ValueType
from ...errors import BindError, TransportError
from ...exchanges import combine, cut, reduce
from ...failures.interruptions import is_interruption
from ...poison import Poison
from ..memory.codecs import Codec, RowsCodec, codec_of
from ..memory.parallel_memcpy import Copier
from .messages import Active, Incoming, Outgoing, RecvQueue, SendQueue
from .moving_rows import KnownRows, MovingRows

Steps = Generator[None, None, Any]

SPLIT_BYTES = 256 * 1024
"""All-reduces of more than this, on three ranks or more, reduce a part on each rank and then
exchange the parts: every byte is then added once, not once on each rank."""


@dataclass(eq=False, slots=True)
class GroupQueues:
    """The queues between this rank and the other members of a channel's group.

    Attributes:
        rank: this rank.
        ranks: the members, in group order.
        near: the members on this rank's machine, itself among them; one queue of each serves all
            others.
        out: queues to the other members, each with the ranks that it serves.
        into: queues from the other members, by rank.
        active: where to register while collectives are under way.
        copier: copies large payloads.
        room: bytes of a small message.
        known_rows: the rows that exchanges of rows have in common.
        entered: the collectives that are under way.
        begun: how many of them have begun; the others wait for the last of these to send.
    """

    rank: int
    ranks: tuple[int, ...]
    near: Set[int]
    out: Sequence[tuple[tuple[int, ...], SendQueue]]
    into: Mapping[int, RecvQueue]
    active: Active
    copier: Copier
    room: int
    known_rows: KnownRows = field(default_factory=KnownRows)
    entered: deque[CollectivePort] = field(default_factory=deque)
    begun: int = 0

    @property
    def is_idle(self) -> bool:
        """Return whether no collective is under way."""
        return not self.entered

    def enter(self, port: CollectivePort) -> None:
        """Run a collective after those that entered before it."""
        self.entered.append(port)
        self.active[self] = None
        self.progress()

    def progress(self) -> None:
        """Run the collectives until they have to wait."""
        entered = self.entered
        self._begin()
        while entered and (entered[0].done or entered[0].advance()):
            entered.popleft()
            self.begun -= 1
            self._begin()
        if not entered:
            self.active.pop(self, None)

    def _begin(self) -> None:
        """Begin the first collective, and those behind it that may send beside it."""
        entered, begun = self.entered, self.begun
        while begun < len(entered) and (
            not begun or (entered[begun].is_small and entered[begun - 1].has_sent)
        ):
            entered[begun].advance()
            begun += 1
        self.begun = begun

    def reset(self) -> None:
        """Forget all collectives."""
        self.entered.clear()
        self.begun = 0
        self.active.pop(self, None)


class CollectivePort:
    """The port of one collective. Its result is the receiver's own.

    Attributes:
        done: whether the collective is over.
        is_small: whether its messages are small.
    """

    needs_release = False

    def __init__(
        self, op: Collective, group: GroupQueues, operand: ValueType | None, result: ValueType
    ) -> None:
        self._group = group
        self._algorithm = _algorithm(op, group, operand, result)
        sent = operand if operand is not None else result
        self.is_small = isinstance(sent, TensorType) and sent.nbytes <= group.room
        self._sends_once = not isinstance(self._algorithm, _SplitAllReduce)
        self._steps: Steps | None = None
        self._value: Any = None
        self.done = False
        self._error: BaseException | None = None

    def start(self, value: Any) -> None:
        self.done, self._error, self._value = False, None, None
        self._steps = self._algorithm.run(value)
        self._group.enter(self)

    def fail(self, poison: Poison) -> None:
        self.start(poison)

    def poll(self) -> bool:
        if not self.done:
            self._group.progress()
        return self.done

    def take(self) -> Any:
        if self._error is not None:
            raise self._error
        value, self._value = self._value, None
        return value

    def release(self) -> None:
        """Return: nothing is held."""

    @property
    def has_sent(self) -> bool:
        """Return whether a collective that has begun sends nothing more."""
        return self._sends_once or self.done

    def advance(self) -> bool:
        """Run until the next wait; returns whether the collective is over."""
        assert self._steps is not None
        try:
            next(self._steps)
        except StopIteration as end:
            self._value = end.value
        except BaseException as error:
            # `take` raises it again, where the engine knows which op has failed.
            if is_interruption(error):
                raise
            self._error = error
        else:
            return False
        self._steps = None
        self.done = True
        return True


class _MessageExchange:
    """One exchange of messages, and the value that this rank makes from those it receives.

    Inside a machine an operand is written once, whole, and all other members there read it in
    place, even those that do not need it. A receiver on another machine is sent only what it needs.

    Args:
        sent: the type of the operands.
        donates: whether the result of a reduction may lie in the memory of this rank's operand.
    """

    def __init__(
        self, exchange: Exchange, group: GroupQueues, sent: ValueType, donates: bool = False
    ) -> None:
        self._exchange = exchange
        self._donates = donates
        self._rank = group.rank
        self._near = group.near
        self._member = group.ranks.index(group.rank)
        self._receives = group.rank in exchange.receivers
        self._sent, self._part, self._copier = sent, _part_of(exchange, sent), group.copier
        receivers = set(exchange.receivers)
        # Queues with their outgoing messages, and the members that each goes to.
        self._out: list[tuple[SendQueue, Outgoing, tuple[int, ...]]] = []
        for ranks, queue in group.out if group.rank in exchange.senders else ():
            if not receivers.isdisjoint(ranks):
                message = Outgoing(self._codec(group.near >= set(ranks)), is_held=True)
                self._out.append((queue, message, ranks))
        # Queues with their incoming messages, by rank; values are held in place until `release`.
        self._into: dict[int, tuple[RecvQueue, Incoming]] = {}
        for source in exchange.senders:
            is_near = source in group.near
            served = group.near - {source} if is_near else {group.rank}
            if source != group.rank and not receivers.isdisjoint(served):
                self._into[source] = group.into[source], Incoming(self._codec(is_near), hold=True)
        self._messages: list[tuple[SendQueue | RecvQueue, Outgoing | Incoming]]
        self._messages = [(queue, message) for queue, message, _ in self._out]
        self._messages += self._into.values()
        self._combines = self._receives and not isinstance(sent, UnitType)

    def _codec(self, is_near: bool) -> Codec:
        """How messages are written to members on this machine, or on others."""
        return codec_of(self._sent if is_near else self._part, self._copier)

    def _content(self, value: Any, ranks: tuple[int, ...]) -> Any:
        """What a message to some members has: the operand, or one's part on another machine."""
        if self._exchange.cut is None or self._near >= set(ranks):
            return value
        return cut(self._exchange, value, self._exchange.members.index(ranks[0]))

    def run(self, value: Any) -> Steps:
        """The value that this rank gets; None if it gets none."""
        pieces = yield from self.pieces(value)
        donated = self._member if self._donates and value.is_contiguous() else None
        result = combine(self._exchange, pieces, donated) if self._combines else None
        self.release()
        return result

    def pieces(self, value: Any) -> Generator[None, None, list[Any]]:
        """This rank's piece of each sender's operand; others' stay in place until `release`."""
        values = yield from self._contents(value)
        values[self._rank] = value
        return [
            self._piece(rank, values[rank]) for rank in self._exchange.senders if rank in values
        ]

    def _contents(self, value: Any) -> Generator[None, None, dict[int, Any]]:
        """Send all messages; the contents of those that come, by rank.

        Raises:
            Poison: a sender has failed; all its receivers learn of it in this exchange.
        """
        for source, expected in self._into.values():
            source.post(expected)
        for queue, message, ranks in self._out:
            if isinstance(value, Poison):
                message.fail(value)
            else:
                message.load(self._content(value, ranks))
            queue.send(message)
        while not self._is_done():
            yield
        try:
            into = self._into if self._receives else {}
            values = {rank: message.take() for rank, (_, message) in into.items()}
            if isinstance(value, Poison):
                raise value
        except BaseException:  # not only Exceptions: an object's class may raise anything
            self.release()
            raise
        return values

    def _is_done(self) -> bool:
        """Return whether all messages have come, and `value` may be changed; makes progress."""
        is_done = True
        for queue, message in self._messages:
            if not message.done:
                queue.progress()
                is_done = is_done and message.done
        return is_done

    def _piece(self, source: int, value: Any) -> Any:
        return cut(self._exchange, value, self._member) if source in self._near else value

    def release(self) -> None:
        """Let the senders overwrite their values."""
        for queue, message in self._into.values():
            if message.error is None:
                queue.release(message)


class _RowExchange(_MessageExchange):
    """An exchange of the rows that are a receiver's, or a sender's; operands come with ids.

    All members have the same ids. So a message needs to say of its rows neither which nor how many
    they are.
    """

    def __init__(
        self, op: Collective, group: GroupQueues, sent: TensorType, result: TensorType
    ) -> None:
        _MessageExchange.__init__(self, op.exchange, group, sent)
        gathers = op.exchange.concat is not None
        self._whole, self._result_shape = (result if gathers else sent).shape, result.shape
        assert op.exchange.routed is not None, "only some rows travel"
        self._routed, self._lead = op.exchange.routed, op.exchange.routed.lead
        self._known_rows = group.known_rows
        self._moving: MovingRows

    def _codec(self, is_near: bool) -> Codec:
        assert isinstance(self._sent, TensorType), "the caller has looked"
        return RowsCodec(self._sent.dtype)

    def _content(self, value: Any, ranks: tuple[int, ...]) -> Any:
        return self._matrix(value[0]), self._moving.sent(self._member, self._numbers(ranks))

    def _numbers(self, ranks: Iterable[int]) -> list[int]:
        """The numbers in the group, in its order."""
        return sorted(map(self._exchange.members.index, ranks))

    def _matrix(self, tensor: torch.Tensor) -> torch.Tensor:
        rows = math.prod(tensor.shape[: self._lead])
        return tensor.reshape(rows, tensor.numel() // max(rows, 1))

    def run(self, value: Any) -> Steps:
        if not isinstance(value, Poison):
            rows = self._known_rows.of(self._routed, self._whole, value[1])
            self._moving = MovingRows(self._exchange, rows)
        contents = yield from self._contents(value)
        try:
            return self._combined(self._matrix(value[0]), contents)
        finally:
            self.release()

    def _combined(self, own: torch.Tensor, contents: dict[int, Any]) -> torch.Tensor:
        gathers, part = self._exchange.concat is not None, len(own)
        part //= 1 if gathers else len(self._exchange.members)
        result = own.new_zeros(math.prod(self._result_shape[: self._lead]), own.shape[1])
        for source, rank in enumerate(self._exchange.members):
            if rank == self._rank:
                at = slice(source * part, (source + 1) * part)
                is_own = self._moving.own(source)
                if gathers:
                    zeros = result[at]
                    torch.where(is_own, own, zeros, out=zeros)
                else:
                    result.add_(torch.where(is_own, own[at], 0))
                continue
            served = self._near - {rank} if rank in self._near else {self._rank}
            positions, rows = self._moving.taken(source, self._numbers(served), self._member)
            matrix = self._rows_of(rank, contents[rank], positions, rows)
            (result.index_copy_ if gathers else result.index_add_)(0, rows, matrix)
        return result.view(self._result_shape)

    def _rows_of(
        self, rank: int, content: torch.Tensor, positions: torch.Tensor | None, rows: torch.Tensor
    ) -> torch.Tensor:
        """A message as a matrix, or some rows of it.

        Raises:
            TransportError: the sender has other ids.
        """
        width = math.prod(self._result_shape[self._lead :])
        matrix = content.view(-1, width) if width else content.new_empty(len(rows), 0)
        if positions is not None and width:
            matrix = matrix.index_select(0, positions)
        if len(matrix) != len(rows):
            raise TransportError(
                f"rank {rank} has sent {len(matrix)} rows of {len(rows)} by its ids, which are the "
                "same on all ranks"
            )
        return matrix


class _SplitAllReduce:
    """All-reduce in two exchanges: each rank reduces one part, then all gather the parts.

    Args:
        operand: the operand's type.
        donates: as in `_MessageExchange`.
    """

    def __init__(
        self, exchange: Exchange, group: GroupQueues, operand: TensorType, donates: bool
    ) -> None:
        self._donates = donates
        assert exchange.reduce is not None, "an all-reduce reduces"
        self._op = exchange.reduce
        self._shape = operand.shape
        count = len(group.ranks)
        self._part = -(-operand.numel // count)
        self._numel = operand.numel
        self._begin = group.ranks.index(group.rank) * self._part
        self._whole = _MessageExchange(exchange, group, operand)
        part = TensorType(operand.dtype, (self._part,))
        self._parts = _MessageExchange(exchange, group, part)

    def run(self, value: Any) -> Steps:
        tensors = yield from self._whole.pieces(value)
        own_slice = slice(self._begin, self._begin + self._part)
        part = reduce([tensor.reshape(-1)[own_slice] for tensor in tensors], self._op)
        self._whole.release()
        missing = self._part - part.numel()
        if missing:
            part = torch.cat([part, part.new_zeros(missing)])
        parts = yield from self._parts.pieces(part)
        if self._donates and value.is_contiguous():
            for target, source in zip(value.view(-1).split(self._part), parts, strict=False):
                target.copy_(source[: target.numel()])
            result = value
        else:
            result = torch.cat(parts)[: self._numel].view(self._shape)
        self._parts.release()
        return result


def _part_of(exchange: Exchange, sent: ValueType) -> ValueType:
    """The type of a receiver's piece of an operand."""
    if exchange.cut is None or not isinstance(sent, TensorType):
        return sent
    return resized(sent, exchange.cut, sent.shape[exchange.cut] // len(exchange.members))


def _whole_of(exchange: Exchange, piece: ValueType) -> ValueType:
    """The type of an operand, from the type of a receiver's piece."""
    if exchange.cut is None or not isinstance(piece, TensorType):
        return piece
    return resized(piece, exchange.cut, piece.shape[exchange.cut] * len(exchange.members))


def _algorithm(
    op: Collective, group: GroupQueues, operand: ValueType | None, result: ValueType
) -> _MessageExchange | _SplitAllReduce:
    exchange = op.exchange
    if exchange.routed is not None:
        if not isinstance(operand, TensorType) or not isinstance(result, TensorType):
            raise BindError(f"`{op.opcode}` moves rows of tensors, and its operand is {operand}")
        return _RowExchange(op, group, operand, result)
    if not exchange.senders:  # a barrier: every member sends a unit to every member
        return _MessageExchange(Exchange(group.ranks, group.ranks, group.ranks), group, UnitType())
    sent = operand if operand is not None else _whole_of(exchange, result)
    if exchange.is_whole:
        return _MessageExchange(exchange, group, sent)
    if not isinstance(sent, TensorType):
        raise BindError(f"`{op.opcode}` combines tensors, and its operand is {sent}")
    donates = isinstance(op, AllReduce) and bool(op.donated)
    split_up = sent.nbytes > SPLIT_BYTES and len(group.ranks) > 2
    if exchange.reduce is not None and exchange.is_shared and split_up:
        return _SplitAllReduce(exchange, group, sent, donates)
    return _MessageExchange(exchange, group, sent, donates)
