"""The CPU communicator: makes the queues of a plan's channels, and the ports on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import monotonic

from ...ir.ops import Broadcast, Collective, Recv, Send
from ...ir.ops.module import Channel
from ...ir.types import ObjectType, TensorType, ValueType
from ..base import Port
from ..errors import BindError, StepTimeout
from .memory.codecs import TensorCodec, codec_of
from .memory.layout import LINE, SlotLayout, round_up
from .queues.broadcast_ports import BroadcastRecvPort, BroadcastSendPort
from .queues.collectives import CollectivePort, GroupQueues
from .queues.local_receiver import LocalReceiver
from .queues.local_sender import LocalSender
from .queues.messages import Active, Incoming, Outgoing, mover
from .queues.object_ports import ObjectRecvPort, ObjectSendPort
from .queues.ports import RecvPort, SendPort, SlotRecvPort, SlotSendPort
from .queues.remote import Counts, RemoteReceiver, RemoteSender
from .waiting.node import MachineNode

RING_SLOTS = 4
RING_BYTES = 16 * 1024
_RESET_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A rank that sends on a channel, and the ranks that receive from it.

    Attributes:
        channel: the channel.
        source: the sending rank.
        local: the receivers on the sender's machine, in group order; they share one segment.
        remote: the other receivers; each has MPI messages of its own.
        tag: the first remote receiver's message tag; each receiver takes two tags.
    """

    channel: Channel
    source: int
    local: tuple[int, ...]
    remote: tuple[int, ...]
    tag: int

    @property
    def layout(self) -> SlotLayout:
        """The layout of the segment."""
        channel = self.channel
        planned = 0 if channel.collective else channel.slots or 0
        return SlotLayout(
            planned=planned,
            planned_bytes=round_up(max(channel.slot_bytes or 0, LINE)) if planned else 0,
            ring=RING_SLOTS,
            ring_bytes=RING_BYTES,
            readers=len(self.local),
        )


class CpuCommunicator:
    """Serves some channels of a plan: shared memory inside a machine, MPI between machines.

    Making one is collective; all ranks give the same channels in the same order.

    Attributes:
        progress: moves on the queues that have something under way.

    Raises:
        TransportError: there is no shared memory for the channels' slots.
    """

    def __init__(self, node: MachineNode, channels: Sequence[Channel]) -> None:
        self._node = node
        self._active: Active = {}
        self.progress = mover(self._active)
        # Queues to send on, by channel and by their receivers; queues to receive from, by channel
        # and sender.
        self._senders: dict[int, dict[tuple[int, ...], LocalSender | RemoteSender]] = {}
        self._receivers: dict[tuple[int, int], LocalReceiver | RemoteReceiver] = {}
        self._groups: dict[int, GroupQueues] = {}
        endpoints = list(self._endpoints(channels))
        self._make_local(endpoints)
        self._make_remote(endpoints)
        for channel in channels:
            if channel.collective and node.rank in channel.ranks:
                self._groups[channel.id] = self._group(channel)

    def send_port(self, op: Send, channel: Channel, type_: ValueType) -> Port:
        """The port of a `send`.

        Raises:
            BindError: the message does not fit into its planned slot.
        """
        self._check_slot(op, channel, type_)
        (queue,) = self._senders[channel.id].values()
        if isinstance(type_, ObjectType) and isinstance(queue, LocalSender):
            return ObjectSendPort(queue)
        codec = codec_of(type_, self._node.copier)
        if op.slot is None or not isinstance(codec, TensorCodec) or isinstance(queue, RemoteSender):
            return SendPort(queue, Outgoing(codec, op.slot))
        return SlotSendPort(queue, codec, op.slot)

    def recv_port(self, op: Recv, channel: Channel, type_: ValueType) -> Port:
        """The port of a `recv`.

        Raises:
            BindError: the message does not fit into its planned slot.
        """
        self._check_slot(op, channel, type_)
        queue = self._receivers[channel.id, op.peer]
        if isinstance(type_, ObjectType) and isinstance(queue, LocalReceiver):
            return ObjectRecvPort(queue)
        codec = codec_of(type_, self._node.copier)
        if op.slot is None or op.operands or not isinstance(codec, TensorCodec):
            return RecvPort(queue, Incoming(codec, op.slot))
        if isinstance(queue, LocalReceiver):
            return SlotRecvPort(queue, codec, op.slot)
        return RecvPort(queue, Incoming(codec, op.slot, hold=True))

    def collective_port(
        self,
        op: Collective,
        channel: Channel,
        operand: ValueType | None,
        result: ValueType,
    ) -> Port:
        """The port of a collective.

        Raises:
            BindError: the operand is not of a type that the collective combines.
        """
        group = self._groups[channel.id]
        if isinstance(op, Broadcast) and isinstance(result, ObjectType):
            port = self._broadcast_port(op, group, channel, result)
            if port is not None:
                return port
        return CollectivePort(op, group, operand, result)

    def _broadcast_port(
        self, op: Broadcast, group: GroupQueues, channel: Channel, type_: ObjectType
    ) -> Port | None:
        """A faster port, if the root and all other members are on one machine; else None."""
        if len({self._node.world.nodes[rank] for rank in channel.ranks}) > 1:
            return None
        if self._node.rank != op.root:
            source = self._receivers[channel.id, op.root]
            assert isinstance(source, LocalReceiver)
            return BroadcastRecvPort(op, group, type_, source)
        for queue in self._senders.get(channel.id, {}).values():
            if isinstance(queue, LocalSender):
                return BroadcastSendPort(op, group, type_, queue)
        return None  # the root is alone

    def reset(self) -> None:
        """Forget every message in flight, on all ranks together.

        Raises:
            StepTimeout: messages between machines are stuck.
        """
        for group in self._groups.values():
            group.reset()
        for queue in self._queues():
            if isinstance(queue, (LocalSender, LocalReceiver)):
                queue.reset()
        if self._node.comm is not None:
            self._reset_remote()

    def close(self) -> None:
        """Give back queues and their memory; idempotent."""
        for group in self._groups.values():
            group.reset()
        for queue in self._queues():
            queue.close()
        self._senders.clear()
        self._receivers.clear()
        self._groups.clear()

    def _queues(self) -> Iterator[LocalSender | RemoteSender | LocalReceiver | RemoteReceiver]:
        for senders in self._senders.values():
            yield from senders.values()
        yield from self._receivers.values()

    # -- making queues ----------------------------------------------------------------------

    def _endpoints(self, channels: Sequence[Channel]) -> Iterator[Endpoint]:
        """The endpoints of all channels, in the same order on all ranks."""
        nodes = self._node.world.nodes
        for channel in channels:
            sources = channel.ranks if channel.collective else channel.ranks[:1]
            for source in sources:
                others = [rank for rank in channel.ranks if rank != source]
                near = [rank for rank in others if nodes[rank] == nodes[source]]
                far = [rank for rank in others if nodes[rank] != nodes[source]]
                tag = self._node.reserve_tags(2 * len(far))
                yield Endpoint(channel, source, tuple(near), tuple(far), tag)

    def _make_local(self, endpoints: Sequence[Endpoint]) -> None:
        node = self._node
        near = {(end.channel.id, end.source): end for end in endpoints if end.local}
        own = {k: end.layout.nbytes for k, end in near.items() if end.source == node.rank}
        others = {
            key: (end.source, end.layout.nbytes)
            for key, end in near.items()
            if node.rank in end.local
        }
        for key, memory in node.share(own, others, "a step's messages").items():
            end = near[key]
            if end.source == node.rank:
                sender = LocalSender(node, end.layout, memory, end.local, self._active)
                self._senders.setdefault(end.channel.id, {})[end.local] = sender
            else:
                reader = end.local.index(node.rank)
                self._receivers[key] = LocalReceiver(
                    node, end.layout, memory, end.source, reader, self._active
                )

    def _make_remote(self, endpoints: Sequence[Endpoint]) -> None:
        comm, rank, active = self._node.comm, self._node.rank, self._active
        for end in endpoints:
            channel = end.channel.id
            for index, peer in enumerate(end.remote):
                tag = end.tag + 2 * index
                if end.source == rank:
                    senders = self._senders.setdefault(channel, {})
                    senders[peer,] = RemoteSender(comm, peer, tag, active)
                elif peer == rank:
                    receiver = RemoteReceiver(comm, end.source, tag, active)
                    self._receivers[channel, end.source] = receiver

    def _group(self, channel: Channel) -> GroupQueues:
        rank = self._node.rank
        into = {peer: self._receivers[channel.id, peer] for peer in channel.ranks if peer != rank}
        near = {peer for peer in channel.ranks if self._node.is_local(peer)}
        out = list(self._senders.get(channel.id, {}).items())
        copier = self._node.copier
        return GroupQueues(rank, channel.ranks, near, out, into, self._active, copier, RING_BYTES)

    def _check_slot(self, op: Send | Recv, channel: Channel, type_: ValueType) -> None:
        if op.slot is None:
            return
        if op.slot >= (channel.slots or 0):
            raise BindError(
                f"`{op.opcode}` {op.seq} of channel {channel.id} uses slot {op.slot}, and the "
                f"channel has {channel.slots or 0} slots"
            )
        if isinstance(type_, TensorType) and type_.nbytes > round_up(channel.slot_bytes or 0):
            raise BindError(
                f"`{op.opcode}` {op.seq} of channel {channel.id} carries {type_}, which does not "
                f"fit into a slot of {channel.slot_bytes or 0} bytes"
            )

    # -- after a failure --------------------------------------------------------------------

    def _reset_remote(self) -> None:
        """Bring both sides of each queue to the same number of messages, and complete them all."""
        node = self._node
        senders = {
            (channel, peer): queue
            for channel, queues in self._senders.items()
            for (peer, *_), queue in queues.items()
            if isinstance(queue, RemoteSender)
        }
        receivers = {k: q for k, q in self._receivers.items() if isinstance(q, RemoteReceiver)}
        everyone: list[tuple[dict[tuple[int, int], Counts], dict[tuple[int, int], Counts]]]
        everyone = node.world.allgather(
            (
                {key: queue.counts for key, queue in senders.items()},
                {key: queue.counts for key, queue in receivers.items()},
            )
        )
        for (channel, peer), sender in senders.items():
            sender.reset(everyone[peer][1][channel, node.rank])
        deadline = monotonic() + _RESET_SECONDS
        stuck: set[RemoteSender | RemoteReceiver] = set()
        for (channel, peer), receiver in receivers.items():
            sent = everyone[peer][0][channel, node.rank]
            if not receiver.drain(sent, lambda: monotonic() > deadline):
                stuck.add(receiver)
        left: list[RemoteSender | RemoteReceiver] = [*senders.values(), *receivers.values()]
        while left := [queue for queue in left if queue in stuck or not queue.finish_reset()]:
            if monotonic() > deadline:
                peers = sorted({queue.peer for queue in left})
                raise StepTimeout(
                    f"messages between rank {node.rank} and ranks {peers} are stuck after a "
                    "failed step; start the job again"
                )
