"""The CPU communicator: makes the lanes of a plan's channels, and the ports on them."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import monotonic

from ...ir.module import Channel
from ...ir.ops import Broadcast, Collective, Recv, Send
from ...ir.types import ObjectType, TensorType, ValueType
from ..base import Port
from ..errors import BindError, StepTimeout, TransportError
from .memory.codecs import TensorCodec, codec_of
from .memory.layout import LINE, SlotLayout, round_up
from .node import Node
from .queues.broadcast_ports import BroadcastRecvPort, BroadcastSendPort
from .queues.collectives import CollectivePort, Group
from .queues.local import LocalReceiver, LocalSender
from .queues.messages import Active, ReceiveLane, SendLane, incoming, mover, outgoing
from .queues.object_ports import ObjectRecvPort, ObjectSendPort
from .queues.ports import RecvPort, SendPort, SlotRecvPort, SlotSendPort
from .queues.remote import Counts, RemoteReceiver, RemoteSender

RING_SLOTS = 4
RING_BYTES = 16 * 1024
_RESET_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Wire:
    """One member's way out on a channel.

    Attributes:
        channel: which.
        source: the sending rank.
        local: the receivers on the sender's machine, in group order; they share one segment.
        remote: the other receivers; each has MPI messages of its own.
        tag: tag of the first remote receiver's messages; each takes two.
    """

    channel: Channel
    source: int
    local: tuple[int, ...]
    remote: tuple[int, ...]
    tag: int

    @property
    def layout(self) -> SlotLayout:
        """How the segment is laid out."""
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
        progress: see `Communicator`.

    Raises:
        TransportError: there is no shared memory for the channels' slots.
    """

    def __init__(self, node: Node, channels: Sequence[Channel]) -> None:
        self._node = node
        self._active: Active = {}
        self.progress = mover(self._active)
        self._senders: dict[tuple[int, int], LocalSender | RemoteSender] = {}
        self._fans: dict[int, list[SendLane]] = {}
        self._receivers: dict[tuple[int, int], LocalReceiver | RemoteReceiver] = {}
        self._groups: dict[int, Group] = {}
        self._keys: list[int] = []
        wires = list(self._wires(channels))
        self._make_local(wires)
        self._make_remote(wires)
        for channel in channels:
            if channel.collective and node.rank in channel.ranks:
                self._groups[channel.id] = self._group(channel)

    def send_port(self, op: Send, channel: Channel, type_: ValueType) -> Port:
        """See `Communicator`.

        Raises:
            BindError: the message does not fit into its planned slot.
        """
        self._check_slot(op, channel, type_)
        lane = self._fans[channel.id][0]
        if isinstance(type_, ObjectType) and isinstance(lane, LocalSender):
            return ObjectSendPort(lane)
        codec = codec_of(type_, self._node.copier)
        if op.slot is not None and isinstance(codec, TensorCodec) and isinstance(lane, LocalSender):
            return SlotSendPort(lane, codec, op.slot)
        return SendPort(lane, outgoing(codec, op.slot))

    def recv_port(self, op: Recv, channel: Channel, type_: ValueType) -> Port:
        """See `Communicator`.

        Raises:
            BindError: the message does not fit into its planned slot.
        """
        self._check_slot(op, channel, type_)
        lane = self._receivers[channel.id, op.peer]
        if isinstance(type_, ObjectType) and isinstance(lane, LocalReceiver):
            return ObjectRecvPort(lane)
        codec = codec_of(type_, self._node.copier)
        if op.slot is None or op.operands or not isinstance(codec, TensorCodec):
            return RecvPort(lane, incoming(codec, op.slot))
        if isinstance(lane, LocalReceiver):
            return SlotRecvPort(lane, codec, op.slot)
        return RecvPort(lane, incoming(codec, op.slot, hold=True))

    def collective_port(
        self,
        op: Collective,
        channel: Channel,
        operand: ValueType | None,
        result: ValueType,
    ) -> Port:
        """See `Communicator`.

        Raises:
            BindError: the operand is not of a type that the collective combines.
        """
        group = self._groups[channel.id]
        port = CollectivePort(op, group, operand, result)
        if isinstance(op, Broadcast) and isinstance(result, ObjectType):
            return self._broadcast_port(op, group, channel, port)
        return port

    def _broadcast_port(
        self, op: Broadcast, group: Group, channel: Channel, port: CollectivePort
    ) -> Port:
        """A faster one where the root and all others are on one machine."""
        node = self._node
        if any(node.node_of(rank) != node.node_of(op.root) for rank in channel.ranks):
            return port
        if node.rank == op.root:
            lanes = self._fans.get(channel.id, ())
            if len(lanes) == 1 and isinstance(lanes[0], LocalSender):
                return BroadcastSendPort(group, lanes[0], port)
            return port
        lane = self._receivers[channel.id, op.root]
        return BroadcastRecvPort(group, lane, port) if isinstance(lane, LocalReceiver) else port

    def reset(self) -> None:
        """See `Communicator`.

        Raises:
            StepTimeout: messages between machines are stuck.
        """
        for group in self._groups.values():
            group.reset()
        for lane in (*self._senders.values(), *self._receivers.values()):
            if isinstance(lane, (LocalSender, LocalReceiver)):
                lane.reset()
        if self._node.comm is not None:
            self._reset_remote()

    def close(self) -> None:
        """See `Communicator`."""
        for group in self._groups.values():
            group.reset()
        for lane in (*self._senders.values(), *self._receivers.values()):
            lane.close()
        for key in self._keys:
            self._node.segments.seal(key)
        self._keys.clear()
        self._senders.clear()
        self._receivers.clear()
        self._fans.clear()
        self._groups.clear()

    # -- making lanes -----------------------------------------------------------------------

    def _wires(self, channels: Sequence[Channel]) -> Iterator[Wire]:
        """Every way out of every member of every channel, on all ranks in the same order."""
        node = self._node
        for channel in channels:
            sources = channel.ranks if channel.collective else channel.ranks[:1]
            for source in sources:
                others = [rank for rank in channel.ranks if rank != source]
                near = [r for r in others if node.node_of(r) == node.node_of(source)]
                far = [r for r in others if node.node_of(r) != node.node_of(source)]
                tag = node.reserve_tags(2 * len(far))
                yield Wire(channel, source, tuple(near), tuple(far), tag)

    def _make_local(self, wires: Sequence[Wire]) -> None:
        node = self._node
        own: dict[tuple[int, int], int] = {}
        problem = None
        try:
            for wire in wires:
                if wire.source == node.rank and wire.local:
                    own[wire.channel.id, wire.source] = self._make_sender(wire)
        except OSError as error:
            problem = str(error)
        opened = None
        everyone = node.world.allgather((own, problem))
        if not any(text for _, text in everyone):
            try:
                self._open_receivers(wires, [keys for keys, _ in everyone])
            except OSError as error:
                opened = str(error)
        problems = [problem or text for text in node.world.allgather(opened or problem)]
        for key in own.values():
            node.segments.seal(key)
        for rank, text in enumerate(problems):
            if text:
                raise TransportError(
                    f"rank {rank} has no shared memory for a step's messages: {text}"
                )

    def _make_sender(self, wire: Wire) -> int:
        segment = self._node.segments.create(wire.layout.nbytes)
        memory = memoryview(segment.memory)
        lane = LocalSender(self._node, wire.layout, memory, wire.local, self._active)
        self._add_sender(wire, wire.local[0], lane)
        return segment.key

    def _open_receivers(
        self, wires: Sequence[Wire], keys: Sequence[dict[tuple[int, int], int]]
    ) -> None:
        node = self._node
        for wire in wires:
            if node.rank in wire.local:
                key = keys[wire.source][wire.channel.id, wire.source]
                layout = wire.layout
                memory: mmap.mmap = node.segments.open(node.pids[wire.source], key, layout.nbytes)
                self._receivers[wire.channel.id, wire.source] = LocalReceiver(
                    node,
                    layout,
                    memoryview(memory),
                    wire.source,
                    wire.local.index(node.rank),
                    self._active,
                )

    def _make_remote(self, wires: Sequence[Wire]) -> None:
        node = self._node
        for wire in wires:
            for index, peer in enumerate(wire.remote):
                tag = wire.tag + 2 * index
                if wire.source == node.rank:
                    lane = RemoteSender(node.comm, peer, tag, self._active)
                    self._add_sender(wire, peer, lane)
                elif peer == node.rank:
                    self._receivers[wire.channel.id, wire.source] = RemoteReceiver(
                        node.comm, wire.source, tag, self._active
                    )

    def _add_sender(self, wire: Wire, peer: int, lane: LocalSender | RemoteSender) -> None:
        self._senders[wire.channel.id, peer] = lane
        self._fans.setdefault(wire.channel.id, []).append(lane)

    def _group(self, channel: Channel) -> Group:
        rank = self._node.rank
        into: dict[int, ReceiveLane] = {
            peer: self._receivers[channel.id, peer] for peer in channel.ranks if peer != rank
        }
        home = self._node.node_of(rank)
        near = {peer for peer in channel.ranks if self._node.node_of(peer) == home}
        served = [tuple(peer for peer in into if peer in near)]
        served += [(peer,) for peer in into if peer not in near]
        out = [(ranks, self._senders[channel.id, ranks[0]]) for ranks in served if ranks]
        return Group(
            rank,
            channel.ranks,
            near,
            out,
            into,
            self._active,
            self._node.copier,
        )

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
        """Bring what each side has asked for and sent to the same count, and complete it all."""
        node = self._node
        senders = {k: lane for k, lane in self._senders.items() if isinstance(lane, RemoteSender)}
        receivers = {
            k: lane for k, lane in self._receivers.items() if isinstance(lane, RemoteReceiver)
        }
        everyone: list[tuple[dict[tuple[int, int], Counts], dict[tuple[int, int], Counts]]]
        everyone = node.world.allgather(
            (
                {key: lane.counts for key, lane in senders.items()},
                {key: lane.counts for key, lane in receivers.items()},
            )
        )
        for (channel, peer), sender in senders.items():
            sender.reset(everyone[peer][1][channel, node.rank])
        deadline = monotonic() + _RESET_SECONDS
        stuck: set[RemoteReceiver] = set()
        for (channel, peer), receiver in receivers.items():
            sent = everyone[peer][0][channel, node.rank]
            if not receiver.drain(sent, lambda: monotonic() > deadline):
                stuck.add(receiver)
        lanes: list[RemoteSender | RemoteReceiver] = [*senders.values(), *receivers.values()]
        while lanes:
            lanes = [lane for lane in lanes if not lane.finish_reset() or lane in stuck]
            if lanes and monotonic() > deadline:
                peers = sorted({lane.peer for lane in lanes})
                raise StepTimeout(
                    f"messages between rank {node.rank} and ranks {peers} are stuck after a "
                    "failed step; start the job again"
                )
