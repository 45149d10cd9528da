"""The communicator on streams: ports for the channels between ranks with devices of one kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...ir.attributes import Stream
from ...ir.ops import Collective, Op, Recv, Send
from ...ir.ops.module import Channel
from ...ir.types import TensorType, ValueType
from ..base import Port
from ..dtypes import TORCH_DTYPES
from ..errors import BindError
from .collectives import Collectives
from .library import Messenger
from .pool import Holder, Pool
from .ports import CollectivePort, StreamRecvPort, StreamSendPort

ALIGNMENT = 256
"""Slots are multiples of this many bytes, as the device's allocator has it."""


class StreamCommunicator:
    """Serves some channels of a plan; implements `Communicator`. Making one is collective.

    Attributes:
        collectives: translates collectives into calls of the library.

    Raises:
        BindError: a rank would be a member of too many of the library's communicators.
        CommunicationError: the ranks cannot be joined.
    """

    collectives: ClassVar[type[Collectives]]

    def __init__(self, pool: Pool, channels: Sequence[Channel], rank: int) -> None:
        self._pool = pool
        self._lease = pool.join(channels)
        self._lines = self._lease.lines
        try:
            self._slots = self._make_slots(channels, rank)
        except BaseException:
            pool.leave(self._lease)  # no caller can close this object, which was not made
            raise

    def send_port(self, op: Send, channel: Channel, type_: ValueType) -> Port:
        """The port of a `send` whose operand has type `type_`."""
        self._check(op)
        tensor = self._only_tensor(op, channel, type_)
        stream, handle = self._stream(op, Stream.SEND)
        library = self._messenger(op, tensor)
        return StreamSendPort(handle, library, self._lines[channel.id], tensor, stream)

    def recv_port(self, op: Recv, channel: Channel, type_: ValueType) -> Port:
        """The port of a `recv` whose future holds a value of type `type_`."""
        self._check(op)
        tensor = self._only_tensor(op, channel, type_)
        stream, handle = self._stream(op, Stream.RECV)
        library, line = self._messenger(op, tensor), self._lines[channel.id]
        into = bool(op.operands)
        slot = None if op.slot is None or into else self._slot(op.slot, channel, tensor)
        device, handle_of = self._pool.device.torch_device, self._pool.handle
        return StreamRecvPort(handle, library, line, tensor, stream, slot, into, device, handle_of)

    def collective_port(
        self,
        op: Collective,
        channel: Channel,
        operand: ValueType | None,
        result: ValueType,
    ) -> Port:
        """The port of a collective; `operand` is None if this rank contributes nothing."""
        self._check(op)
        stream, handle = self._stream(op, Stream.COLLECTIVE)
        line, pool = self._lines[channel.id], self._pool
        parts = self.collectives(op, line, operand, result, pool, handle).parts()
        return CollectivePort(handle, pool.library, line, stream, *parts)

    @property
    def logs(self) -> str:
        """The name of the library's log, for messages."""
        return self._pool.logs

    def of_step(self, name: str) -> None:
        """Name the step whose messages it carries, for errors about communicators."""
        self._lease.step = name

    def progress(self) -> None:
        """Do nothing: the device makes progress by itself."""

    def faults(self) -> Sequence[str]:
        """The failures that the library reports, for watchdogs."""
        return self._pool.errors()

    def hold(self, holder: Holder) -> None:
        """Let `holder` drop its graphs before operations are broken off."""
        self._pool.hold(holder)

    def release_device(self) -> None:
        """Let the device go on where it waits for a rank that has failed; for any thread."""
        self._pool.release_device()

    def break_off(self) -> None:
        """Break off the operations under way, which wait for ranks that have failed."""
        self._pool.abort()

    def reset(self) -> None:
        """Join the other ranks again, once for all plans, after operations were broken off."""
        self._pool.reset()

    def close(self) -> None:
        """Give back the slots, and let the pool have the communicators for other plans.

        The graphs with its messages have been dropped before.
        """
        self._slots.clear()
        self._pool.leave(self._lease)

    def _check(self, op: Send | Recv | Collective) -> None:
        """Raise BindError if the library has no function for an op."""

    def _make_slots(self, channels: Sequence[Channel], rank: int) -> dict[int, Tensor]:
        """Memory for the messages that this rank receives, by channel."""
        slots = {}
        for channel in channels:
            if not channel.collective and channel.ranks[1] == rank and channel.slots:
                size = _padded(channel.slot_bytes or 0)
                slots[channel.id] = torch.empty(
                    channel.slots, size, dtype=torch.uint8, device=self._pool.device.torch_device
                )
        return slots

    def _stream(self, op: Send | Recv | Collective, usual: Stream) -> tuple[Stream, Any]:
        """The stream of an op, and its handle for the library."""
        stream = op.stream or usual
        return stream, self._pool.handle(self._pool.device.stream(stream))

    def _messenger(self, op: Send | Recv, type_: TensorType) -> Messenger:
        """The messenger that sends or receives an op's tensor."""
        if op.batch is not None:
            raise BindError(
                f"`{op.opcode}` {op.seq} of channel {op.chan} is in a batch, which "
                f"{self._pool.library_name} does not need: compile without batch-messages"
            )
        return self._pool.library

    def _only_tensor(self, op: Op, channel: Channel, type_: ValueType) -> TensorType:
        if not isinstance(type_, TensorType):
            pool = self._pool
            raise BindError(
                f"`{op.opcode}` on channel {channel.id} carries {type_}, and {pool.library_name} "
                f"moves tensors between {pool.device_name}s alone; leave the choice to cg, or use "
                "cg.via(x, 'cpu')"
            )
        return type_

    def _slot(self, slot: int, channel: Channel, type_: TensorType) -> Tensor:
        slots = self._slots.get(channel.id)
        if slots is None or slot >= len(slots) or type_.nbytes > slots.shape[1]:
            raise BindError(
                f"slot {slot} of channel {channel.id} cannot take {type_}: the channel has "
                f"{channel.slots or 0} slots of {channel.slot_bytes or 0} bytes"
            )
        flat = slots[slot].narrow(0, 0, type_.nbytes)
        return flat.view(TORCH_DTYPES[type_.dtype]).view(type_.shape)


def _padded(nbytes: int) -> int:
    return max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT
