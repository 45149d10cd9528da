"""Rendezvous of the ends of messages and collectives, and the order in which they complete.

A message completes only when its receive is posted, a collective when all of its group have come,
and what a rank has put on one stream completes in order. A slot of a channel holds one message at a
time. Values are copied, objects by way of pickle, so that nothing is shared that separate processes
could not share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from ...ir.ops import Collective, Exchange, Recv, Send, batch_of
from ...ir.ops.module import Channel
from ...ir.text.printer import format_op
from ...ir.types import ValueType
from ..errors import TransportError
from ..exchanges import outcomes
from ..poison import Poison
from ..program.value_copies import duplicate, overwrite


class VirtualPort:
    """One end of a message or of a collective; implements `Port`.

    Attributes:
        op: the op whose port it is.
        exchange: the exchange of a collective; None for other ops.
        rank: the rank whose end it is.
        type: the type of the value that it sends or receives.
        rendezvous: the rendezvous where it meets the other ends.
        line: the ports that its stream has yet to complete, in order; None without a stream.
        slot: the slot of its channel that a receive reads, if there is one.
        value: the operand, or the tensor to receive into; once `done`, the value that was made.
        done: whether the op is complete.
    """

    def __init__(
        self,
        op: Send | Recv | Collective,
        rank: int,
        type_: ValueType,
        rendezvous: Rendezvous,
        line: deque[VirtualPort] | None,
    ) -> None:
        self.op = op
        self.exchange = op.exchange if isinstance(op, Collective) else None
        self.rank = rank
        self.type = type_
        self.rendezvous = rendezvous
        self.line = line
        self.slot = op.slot if isinstance(op, Recv) else None
        self.value: Any = None
        self.done = False
        self._error: Exception | None = None
        self._copies = False

    def copy_on_start(self) -> None:
        """Let `start` copy the operand."""
        self._copies = True

    def start(self, value: Any) -> None:
        """Come to the rendezvous with the operand, or with the tensor to receive into."""
        # Where freed values are overwritten, programs have to show that they need no copy.
        if self._copies and not self.rendezvous.poison and not isinstance(value, Poison):
            value = duplicate(value, self.type)
        self.value = value
        self.done = False
        self.rendezvous.join(self)

    def fail(self, poison: Poison) -> None:
        """Come with an error in place of the operand; a receive then has no tensor to fill."""
        self.start(None if isinstance(self.op, Recv) else poison)

    def finish(self, value: Any = None, error: Exception | None = None) -> None:
        """Complete the op with the value that it makes, or with an error."""
        self.value = value
        self._error = error
        self.done = True

    def poll(self) -> bool:
        """True if all ends have come."""
        return self.done

    def take(self) -> Any:
        """The value, in storage of this rank's own."""
        if self._error is not None:
            raise self._error
        return self.value

    def release(self) -> None:
        """Drop the value, and let its slot take the next message."""
        if self.slot is not None:
            self.rendezvous.free(self.slot, self.value)
        self.value = None


class Rendezvous(ABC):
    """A channel: for each of its ranks the ports that have been started, in order.

    Args:
        poison: overwrite a message's slot when it is released, so that a use after free shows.
    """

    def __init__(self, channel: Channel, traffic: MessageOrder, poison: bool) -> None:
        self.poison = poison
        self._channel = channel
        self._traffic = traffic
        self._queues: dict[int, deque[VirtualPort]] = {rank: deque() for rank in channel.ranks}
        self._occupied: set[int] = set()

    def join(self, port: VirtualPort) -> None:
        """Put a port on its stream, and complete what can be completed."""
        self._queues[port.rank].append(port)
        if port.line is not None:
            port.line.append(port)
        self._traffic.progress(self)

    def free(self, slot: int, value: Any) -> None:
        """Let a slot that has held `value` take its next message."""
        if self.poison:
            overwrite(value)
        self._occupied.discard(slot)
        self._traffic.progress(self)

    def match(self) -> None:
        """Complete what all ranks have come to, as far as slots and streams allow."""
        queues = self._queues.values()
        while all(queues):
            ports = [queue[0] for queue in queues]
            self._check(ports)
            slot = ports[-1].slot
            if slot in self._occupied or not self._traffic.may_complete(ports):
                return
            for queue in queues:
                queue.popleft()
            if slot is not None:
                self._occupied.add(slot)
            self._complete(ports)
            self._traffic.completed(ports)

    def reset(self) -> None:
        """Forget the ports that have been started."""
        self._occupied.clear()
        for queue in self._queues.values():
            queue.clear()

    @abstractmethod
    def _check(self, ports: Sequence[VirtualPort]) -> None:
        """Raise TransportError if the first ports of all ranks do not belong together."""

    @abstractmethod
    def _complete(self, ports: Sequence[VirtualPort]) -> None:
        """Give each port the value that it makes."""


class MessageRendezvous(Rendezvous):
    """The channel of messages from one rank to another."""

    def _check(self, ports: Sequence[VirtualPort]) -> None:
        send, recv = ports
        assert isinstance(send.op, Send), "the communicator has checked the channel"
        assert isinstance(recv.op, Recv), "the communicator has checked the channel"
        if (send.op.seq, send.op.slot, send.type) != (recv.op.seq, recv.op.slot, recv.type):
            raise TransportError(
                f"messages of channel {self._channel.id} do not match: rank {send.rank} sends by "
                f"`{format_op(send.op)}` a {send.type}, rank {recv.rank} receives by "
                f"`{format_op(recv.op)}` a {recv.type}"
            )

    def _complete(self, ports: Sequence[VirtualPort]) -> None:
        send, recv = ports
        if isinstance(send.value, Poison):
            recv.finish(error=send.value)
        else:
            try:
                copied = duplicate(send.value, recv.type)
            except Exception as error:  # `take` raises it, where the engine knows the op
                recv.finish(error=error)
            else:
                recv.finish(copied if recv.value is None else recv.value.copy_(copied))
        send.finish()


class CollectiveRendezvous(Rendezvous):
    """The channel of a group's collectives."""

    def _check(self, ports: Sequence[VirtualPort]) -> None:
        first = ports[0]
        for port in ports[1:]:
            if (type(port.op), port.op.seq) != (type(first.op), first.op.seq):
                raise TransportError(
                    f"collectives of channel {self._channel.id} do not match: rank {first.rank} "
                    f"has come to `{format_op(first.op)}`, rank {port.rank} to "
                    f"`{format_op(port.op)}`"
                )

    def _complete(self, ports: Sequence[VirtualPort]) -> None:
        exchange = ports[0].exchange
        assert exchange is not None, "the communicator has checked its channel"
        if not exchange.receivers:  # a barrier: all have come, and that is all
            for port in ports:
                port.finish()
            return
        values = {port.rank: port.value for port in ports}
        operands = [values[rank] for rank in exchange.senders]
        poison = next((value for value in operands if isinstance(value, Poison)), None)
        if poison is not None:
            _pass_on(poison, ports, exchange)
            return
        try:
            results = _results(exchange, operands, ports)
        except Exception as error:  # `take` raises it on every rank, as elsewhere
            for port in ports:
                port.finish(error=error)
            return
        for port, result in zip(ports, results, strict=True):
            port.finish(result)


class MessageOrder:
    """The order in which the messages of one fabric complete.

    A message completes when all its ends are first on their streams; the ports of a batch are first
    together. Then the messages behind it on these streams are tried again.

    Attributes:
        held: channel and number of a message that must not complete yet, if any.
    """

    def __init__(self) -> None:
        self.held: tuple[int | None, int | None] | None = None
        self._lines: dict[object, deque[VirtualPort]] = {}
        self._agenda: deque[Rendezvous] = deque()
        self._is_busy = False

    def line(self, key: object) -> deque[VirtualPort]:
        """The line of a stream."""
        return self._lines.setdefault(key, deque())

    def progress(self, rendezvous: Rendezvous) -> None:
        """Complete what can be completed at a rendezvous, and whatever that allows."""
        self._agenda.append(rendezvous)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._agenda:
                self._agenda.popleft().match()
        finally:
            self._agenda.clear()
            self._is_busy = False

    def may_complete(self, ports: Sequence[VirtualPort]) -> bool:
        """True if nothing but the message itself is in the way."""
        if self.held is not None and self.held == (ports[0].op.chan, ports[0].op.seq):
            return False
        return all(map(_is_first, ports))

    def completed(self, ports: Sequence[VirtualPort]) -> None:
        """Take a message off the streams of its ends."""
        for port in ports:
            if port.line is not None:
                port.line.remove(port)
                self._agenda += [
                    follower.rendezvous for follower in takewhile(_is_first, port.line)
                ]

    def reset(self) -> None:
        """Forget all that is on its way."""
        for line in self._lines.values():
            line.clear()


def _is_first(port: VirtualPort) -> bool:
    """True if nothing is ahead of a port on its stream but ports of the same batch."""
    if port.line is None or port.line[0] is port:
        return True
    batch = batch_of(port.op)
    return batch is not None and batch == batch_of(port.line[0].op)


def _pass_on(poison: Poison, ports: Sequence[VirtualPort], exchange: Exchange) -> None:
    """Give receivers the error of a sender, and every other member only its own error."""
    for port in ports:
        own = port.value if isinstance(port.value, Poison) else None
        port.finish(error=poison if port.rank in exchange.receivers else own)


def _results(
    exchange: Exchange, operands: Sequence[Any], ports: Sequence[VirtualPort]
) -> list[Any]:
    if exchange.is_whole:  # a tensor, an object or a unit
        (value,) = operands
        return [duplicate(value, port.type) for port in ports]
    return outcomes(exchange, operands)
