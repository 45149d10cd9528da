"""Communication inside one process, as strict as any transport may be; see `rendezvous.py`."""

from __future__ import annotations

from collections import deque

from ...ir.ops import Collective, Recv, Send
from ...ir.ops.module import Channel
from ...ir.text.printer import format_op
from ...ir.types import ValueType
from ..errors import BindError
from .rendezvous import (
    CollectiveRendezvous,
    MessageOrder,
    MessageRendezvous,
    Rendezvous,
    VirtualPort,
)


class VirtualFabric:
    """The channels of a virtual world.

    Args:
        poison: overwrite a message's slot when it is released, so that a use after free shows.
    """

    def __init__(self, poison: bool = False) -> None:
        self.traffic = MessageOrder()
        self._poison = poison
        self._rendezvous: dict[int, Rendezvous] = {}

    def communicator(self, rank: int) -> VirtualCommunicator:
        """The communicator of one rank."""
        return VirtualCommunicator(self, rank)

    def rendezvous(self, channel: Channel) -> Rendezvous:
        """The rendezvous where the ends of a channel's messages, or its group, meet."""
        rendezvous = self._rendezvous.get(channel.id)
        if rendezvous is None:
            kind = CollectiveRendezvous if channel.collective else MessageRendezvous
            rendezvous = self._rendezvous[channel.id] = kind(channel, self.traffic, self._poison)
        return rendezvous

    def release_held(self) -> bool:
        """Let the message that is held complete; return whether there was one."""
        held, self.traffic.held = self.traffic.held, None
        if held is None:
            return False
        for rendezvous in self._rendezvous.values():
            self.traffic.progress(rendezvous)
        return True

    def reset(self) -> None:
        """Forget all messages in flight."""
        self.traffic.reset()
        for rendezvous in self._rendezvous.values():
            rendezvous.reset()


class VirtualCommunicator:
    """One rank's view of a `VirtualFabric`; implements `Communicator`."""

    def __init__(self, fabric: VirtualFabric, rank: int) -> None:
        self._fabric = fabric
        self._rank = rank

    def send_port(self, op: Send, channel: Channel, type_: ValueType) -> VirtualPort:
        """A port that completes when the receiver has posted its side."""
        self._check_edge(op, channel, (self._rank, op.peer))
        return self._port(op, channel, type_)

    def recv_port(self, op: Recv, channel: Channel, type_: ValueType) -> VirtualPort:
        """A port whose value is a copy of what was sent."""
        self._check_edge(op, channel, (op.peer, self._rank))
        return self._port(op, channel, type_)

    def collective_port(
        self,
        op: Collective,
        channel: Channel,
        operand: ValueType | None,
        result: ValueType,
    ) -> VirtualPort:
        """A port that completes when the whole group has come."""
        if not channel.collective or op.group.ranks != channel.ranks:
            raise BindError(f"`{format_op(op)}`: channel {channel.id} is not of this group")
        return self._port(op, channel, result)

    def progress(self) -> None:
        """Return: nothing moves but by the ranks' own steps."""

    def reset(self) -> None:
        """Forget all messages in flight, of all ranks."""
        self._fabric.reset()

    def close(self) -> None:
        """Return: there is nothing to give back."""

    def _port(
        self, op: Send | Recv | Collective, channel: Channel, type_: ValueType
    ) -> VirtualPort:
        line: deque[VirtualPort] | None = None
        if op.stream is not None:  # the stream is this communicator's alone
            line = self._fabric.traffic.line((id(self), op.stream))
        return VirtualPort(op, self._rank, type_, self._fabric.rendezvous(channel), line)

    def _check_edge(self, op: Send | Recv, channel: Channel, ranks: tuple[int, int]) -> None:
        if channel.collective or channel.ranks != ranks:
            raise BindError(
                f"`{format_op(op)}`: channel {channel.id} leads through {channel.ranks}, "
                f"the op needs one from {ranks[0]} to {ranks[1]}"
            )
        if op.slot is not None and channel.slots is not None and op.slot >= channel.slots:
            raise BindError(f"`{format_op(op)}`: channel {channel.id} has {channel.slots} slots")
