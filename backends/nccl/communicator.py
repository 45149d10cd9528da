"""The NCCL communicator: ports on streams for the channels between ranks with GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...ir.attributes import Stream
from ...ir.module import Channel
from ...ir.ops import Collective, Recv, Send
from ...ir.types import TensorType, ValueType
from ..base import Port, World
from ..devices.base import Device
from ..dtypes import TORCH_DTYPES
from ..errors import BindError
from .library import load
from .pool import Holder, Line, Pool
from .ports import RecvPort, SendPort, collective_port

ALIGNMENT = 256
"""Bytes that slots are multiples of, as the device's allocator has it."""


class NcclCommunicator:
    """Serves some channels of a plan; implements `Communicator`. Making one is collective.

    Raises:
        BindError: a rank would be a member of too many communicators of NCCL.
        CommunicationError: the ranks cannot be joined.
    """

    def __init__(self, pool: Pool, channels: Sequence[Channel], rank: int) -> None:
        self._pool = pool
        self._lines: dict[int, Line] = pool.join(channels)
        self._slots: dict[int, Tensor] = {}
        for channel in channels:
            if not channel.collective and channel.ranks[1] == rank and channel.slots:
                size = _padded(channel.slot_bytes or 0)
                self._slots[channel.id] = torch.empty(
                    channel.slots, size, dtype=torch.uint8, device=pool.device.torch_device
                )

    def send_port(self, op: Send, channel: Channel, type_: ValueType) -> Port:
        """See `Communicator`."""
        tensor = _only_tensor(op.opcode, channel, type_)
        stream, queue = self._queue(op, Stream.SEND)
        return SendPort(queue, self._pool.library, self._lines[channel.id], tensor, stream)

    def recv_port(self, op: Recv, channel: Channel, type_: ValueType) -> Port:
        """See `Communicator`."""
        tensor = _only_tensor(op.opcode, channel, type_)
        stream, queue = self._queue(op, Stream.RECV)
        slot = None if op.slot is None or op.operands else self._slot(op.slot, channel, tensor)
        return RecvPort(
            queue,
            self._pool.library,
            self._lines[channel.id],
            tensor,
            stream,
            slot,
            self._pool.device.torch_device,
        )

    def collective_port(
        self,
        op: Collective,
        channel: Channel,
        operand: ValueType | None,
        result: ValueType,
    ) -> Port:
        """See `Communicator`."""
        stream, queue = self._queue(op, Stream.COLLECTIVE)
        return collective_port(
            op,
            self._lines[channel.id],
            operand,
            result,
            self._pool.library,
            queue,
            stream,
            self._pool.device.torch_device,
        )

    def progress(self) -> None:
        """The device moves on by itself."""

    def faults(self) -> Sequence[str]:
        """What NCCL reports of its communicators; for watchdogs."""
        return self._pool.errors()

    def hold(self, holder: Holder) -> None:
        """Let `holder` drop its graphs before what is under way is broken off."""
        self._pool.hold(holder)

    def break_off(self) -> None:
        """Break off what is under way: it waits for ranks that have failed."""
        self._pool.abort()

    def reset(self) -> None:
        """Join the other ranks again, once for all plans, if something has been broken off."""
        self._pool.reset()

    def close(self) -> None:
        """Give back the slots; the pool keeps the communicators for other plans."""
        self._slots.clear()

    def _queue(self, op: Send | Recv | Collective, usual: Stream) -> tuple[Stream, int]:
        device: Device = self._pool.device
        stream = op.stream or usual
        return stream, device.raw(device.stream(stream))

    def _slot(self, slot: int, channel: Channel, type_: TensorType) -> Tensor:
        slots = self._slots.get(channel.id)
        if slots is None or slot >= len(slots) or type_.nbytes > slots.shape[1]:
            raise BindError(
                f"slot {slot} of channel {channel.id} cannot take {type_}: the channel has "
                f"{channel.slots or 0} slots of {channel.slot_bytes or 0} bytes"
            )
        flat = slots[slot].narrow(0, 0, type_.nbytes)
        return flat.view(TORCH_DTYPES[type_.dtype]).view(type_.shape)


def connect(world: World, channels: Sequence[Channel]) -> NcclCommunicator:
    """NCCL's factory of communicators (`CommunicatorFactory`).

    Raises:
        TransportError: no binding of NCCL is installed.
        BindError: a rank of the channels has no device, or would need too many communicators.
    """
    pool = _pools.get(world)
    if pool is None:
        pool = _pools[world] = make_pool(world)
    return NcclCommunicator(pool, channels, world.rank)


def make_pool(world: World, binding: str | None = None) -> Pool:
    """The communicators of this process, none yet.

    Args:
        binding: `nccl4py` or `cupy`; the first that is installed if None.

    Raises:
        TransportError: no binding of NCCL is installed.
    """
    device = world.device
    return Pool(world, device, None if device is None else load(binding))


_pools: WeakKeyDictionary[World, Pool] = WeakKeyDictionary()


def _padded(nbytes: int) -> int:
    return max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT


def _only_tensor(opcode: str, channel: Channel, type_: ValueType) -> TensorType:
    if not isinstance(type_, TensorType):
        raise BindError(
            f"`{opcode}` on channel {channel.id} carries {type_}, and NCCL moves tensors between "
            "GPUs alone; leave the choice to cg, or use cg.via(x, 'cpu')"
        )
    return type_
