"""Communication inside one process, as strict as any transport may be.

A send completes only when its receive is posted, a collective when all of its group have come, and
what a rank has put on one stream completes in order. A slot of a channel holds one message at a
time. Values are copied, objects by way of pickle, so that nothing is shared that separate processes
could not share.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from ...ir.module import Channel
from ...ir.ops import Collective, Recv, Send
from ...ir.printer import format_op
from ...ir.types import ValueType
from ..errors import BindError, TransportError
from ..failures.poison import Poison
from ..program.value_copies import duplicate, spoil
from .rendezvous import CollectivePort, Meetings
from .traffic import End, Traffic


class VirtualFabric:
    """What the ranks of a virtual world talk through.

    Args:
        poison: overwrite a message's slot when it is released, so that a use after free shows.
    """

    def __init__(self, poison: bool = False) -> None:
        self.poison = poison
        self.traffic = Traffic()
        self._edges: dict[int, _Edge] = {}
        self._meetings: dict[int, Meetings] = {}

    def communicator(self, rank: int) -> VirtualCommunicator:
        """The communicator of one rank."""
        return VirtualCommunicator(self, rank)

    def edge(self, channel: Channel) -> _Edge:
        """Where the messages of a point-to-point channel meet."""
        return self._edges.setdefault(channel.id, _Edge(channel, self.poison, self.traffic))

    def meetings(self, channel: Channel) -> Meetings:
        """Where the group of a collective channel meets."""
        return self._meetings.setdefault(channel.id, Meetings(channel, self.traffic))

    def let_go(self) -> bool:
        """Let the message that is held complete; whether there was one."""
        held, self.traffic.held = self.traffic.held, None
        if held is None:
            return False
        for edge in self._edges.values():
            self.traffic.settle(edge)
        for meetings in self._meetings.values():
            self.traffic.settle(meetings)
        return True

    def reset(self) -> None:
        """Forget all messages in flight."""
        self.traffic.reset()
        for edge in self._edges.values():
            edge.reset()
        for meetings in self._meetings.values():
            meetings.reset()


class VirtualCommunicator:
    """One rank's view of a `VirtualFabric`; implements `base.Communicator`."""

    def __init__(self, fabric: VirtualFabric, rank: int) -> None:
        self._fabric = fabric
        self._rank = rank

    def send_port(self, op: Send, channel: Channel, type_: ValueType) -> SendPort:
        """A port that completes when the receiver has posted its side."""
        self._check_edge(op, channel, (self._rank, op.peer))
        return SendPort(op, type_, self._fabric.edge(channel), self._line(op))

    def recv_port(self, op: Recv, channel: Channel, type_: ValueType) -> RecvPort:
        """A port whose value is a copy of what was sent."""
        self._check_edge(op, channel, (op.peer, self._rank))
        return RecvPort(op, type_, self._fabric.edge(channel), self._line(op))

    def collective_port(
        self,
        op: Collective,
        channel: Channel,
        operand: ValueType | None,
        result: ValueType,
    ) -> CollectivePort:
        """A port that completes when the whole group has come."""
        if not channel.collective or op.group.ranks != channel.ranks:
            raise BindError(f"`{format_op(op)}`: channel {channel.id} is not of this group")
        meetings = self._fabric.meetings(channel)
        return CollectivePort(op, self._rank, result, meetings, self._line(op))

    def progress(self) -> None:
        """Nothing moves but by the ranks' own steps."""

    def reset(self) -> None:
        """Forget all messages in flight, of all ranks."""
        self._fabric.reset()

    def close(self) -> None:
        """Nothing to give back."""

    def _line(self, op: Send | Recv | Collective) -> deque[End] | None:
        """The stream of an op, which is this communicator's alone."""
        return None if op.stream is None else self._fabric.traffic.line((id(self), op.stream))

    def _check_edge(self, op: Send | Recv, channel: Channel, ranks: tuple[int, int]) -> None:
        if channel.collective or channel.ranks != ranks:
            raise BindError(
                f"`{format_op(op)}`: channel {channel.id} leads through {channel.ranks}, "
                f"the op needs one from {ranks[0]} to {ranks[1]}"
            )
        if op.slot is not None and channel.slots is not None and op.slot >= channel.slots:
            raise BindError(f"`{format_op(op)}`: channel {channel.id} has {channel.slots} slots")


class SendPort:
    """The sending side of one message."""

    def __init__(self, op: Send, type_: ValueType, edge: _Edge, line: deque[End] | None) -> None:
        self.op = op
        self.type = type_
        self.place = edge
        self.line = line
        self.label = (op.seq, op.slot, type_)
        self.value: Any = None
        self.done = False
        self._owns = False

    def own(self) -> None:
        """See `Port`."""
        self._owns = True

    def start(self, value: Any) -> None:
        """Offer the message."""
        # Where values that are no more are spoilt, programs are to show that they need no copy.
        is_copied = self._owns and not self.place.poison and not isinstance(value, Poison)
        self.value = duplicate(value, self.type) if is_copied else value
        self.done = False
        self.place.sends.append(self)
        self.place.traffic.start(self)

    def fail(self, poison: Poison) -> None:
        """Offer an error in place of the message."""
        self.start(poison)

    def poll(self) -> bool:
        """Whether the receiver has its copy."""
        return self.done

    def take(self) -> None:
        """A send makes no value."""

    def release(self) -> None:
        """A send has no buffer."""


class RecvPort:
    """The receiving side of one message."""

    def __init__(self, op: Recv, type_: ValueType, edge: _Edge, line: deque[End] | None) -> None:
        self.op = op
        self.label = (op.seq, op.slot, type_)
        self.type = type_
        self.place = edge
        self.line = line
        self.done = False
        self._buffer: Any = None
        self._value: Any = None
        self._error: Exception | None = None

    def start(self, value: Any) -> None:
        """Ask for the message; `value` is the tensor to receive into, or None."""
        self._buffer = value
        self.done = False
        self.place.recvs.append(self)
        self.place.traffic.start(self)

    def fail(self, poison: Poison) -> None:
        """Ask for the message all the same; there is nothing to receive it into."""
        self.start(None)

    def deliver(self, value: Any) -> None:
        """Take over a copy of what was sent."""
        self.done = True
        self._error = value if isinstance(value, Poison) else None
        if self._error is not None:
            return
        try:
            copied = duplicate(value, self.type)
        except Exception as error:  # raised by `take`, where the executor can say whose it is
            self._error = error
            return
        if self._buffer is not None:
            copied = self._buffer.copy_(copied)
        self._value = copied

    def poll(self) -> bool:
        """Whether the message has come."""
        return self.done

    def take(self) -> Any:
        """The message."""
        if self._error is not None:
            raise self._error
        return self._value

    def release(self) -> None:
        """Let the slot take its next message."""
        if self.op.slot is not None:
            if self.place.poison:
                spoil(self._value)
            self.place.free(self.op.slot)
        self._value = self._buffer = None


class _Edge:
    """One point-to-point channel: offers and requests, each in order, and the slots in use."""

    def __init__(self, channel: Channel, poison: bool, traffic: Traffic) -> None:
        self.sends: deque[SendPort] = deque()
        self.recvs: deque[RecvPort] = deque()
        self.poison = poison
        self.traffic = traffic
        self._channel = channel
        self._occupied: set[int] = set()

    def match(self) -> None:
        """Hand over as many messages as both sides and the slots allow."""
        while self.sends and self.recvs:
            send, recv = self.sends[0], self.recvs[0]
            self._check(send, recv)
            if recv.op.slot in self._occupied or not self.traffic.may_complete((send, recv)):
                return
            self.sends.popleft()
            self.recvs.popleft()
            if recv.op.slot is not None:
                self._occupied.add(recv.op.slot)
            recv.deliver(send.value)
            send.value = None
            send.done = True
            self.traffic.completed((send, recv))

    def free(self, slot: int) -> None:
        self._occupied.discard(slot)
        self.traffic.settle(self)

    def reset(self) -> None:
        self.sends.clear()
        self.recvs.clear()
        self._occupied.clear()

    def _check(self, send: SendPort, recv: RecvPort) -> None:
        if send.label != recv.label:
            raise TransportError(
                f"messages of channel {self._channel.id} do not match: rank "
                f"{self._channel.ranks[0]} sends by `{format_op(send.op)}` a {send.type}, rank "
                f"{self._channel.ranks[1]} receives by `{format_op(recv.op)}` a {recv.type}"
            )
