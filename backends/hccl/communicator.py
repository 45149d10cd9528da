"""The HCCL communicator: ports on streams for the channels between ranks with NPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from ...ir.attributes import Stream
from ...ir.module import Channel
from ...ir.ops import Collective, Op, Recv, Send
from ...ir.types import ObjectType, ValueType
from ..base import Port, World
from ..errors import BindError
from ..nccl.communicator import NcclCommunicator
from ..nccl.ports import CollectivePort
from .library import HcclLibrary
from .pool import HcclPool
from .ports import HcclCollectives, check_supported
from .symbols import load


class HcclCommunicator(NcclCommunicator):
    """Serves some channels of a plan; implements `Communicator`. Making one is collective.

    Raises:
        BindError: a rank would be a member of too many communicators of HCCL.
        CommunicationError: the ranks cannot be joined.
    """

    def send_port(self, op: Send, channel: Channel, type_: ValueType) -> Port:
        """See `Communicator`."""
        self._check(op, channel, type_)
        return super().send_port(op, channel, type_)

    def recv_port(self, op: Recv, channel: Channel, type_: ValueType) -> Port:
        """See `Communicator`."""
        self._check(op, channel, type_)
        return super().recv_port(op, channel, type_)

    def collective_port(
        self,
        op: Collective,
        channel: Channel,
        operand: ValueType | None,
        result: ValueType,
    ) -> Port:
        """See `Communicator`."""
        self._check(op, channel, result if operand is None else operand)
        stream, queue = self._queue(op, Stream.COLLECTIVE)
        line, library = self._lines[channel.id], self._library
        device = self._pool.device.torch_device
        parts = HcclCollectives(op, line, operand, result, library, queue, device).parts()
        return CollectivePort(queue, library, line, stream, *parts)

    @property
    def _library(self) -> HcclLibrary:
        found = self._pool.library
        assert isinstance(found, HcclLibrary), "the pool was made with one"
        return found

    def _queue(self, op: Send | Recv | Collective, usual: Stream) -> tuple[Stream, Any]:
        """The queue itself: what its raw handle is has to be asked at each call."""
        stream = op.stream or usual
        return stream, self._pool.device.stream(stream)

    def _check(self, op: Op, channel: Channel, type_: ValueType) -> None:
        if isinstance(type_, ObjectType):
            raise BindError(
                f"`{op.opcode}` on channel {channel.id} carries {type_}, and HCCL moves tensors "
                "between NPUs alone; leave the choice to cg, or use cg.via(x, 'cpu')"
            )
        check_supported(op, self._library.symbols)


def connect(
    world: World, channels: Sequence[Channel], library: str | None = None
) -> HcclCommunicator:
    """HCCL's factory of communicators (`CommunicatorFactory`).

    Args:
        library: path of `libhccl.so`; see `symbols.load`. What the first call says holds.

    Raises:
        TransportError: there is no HCCL on this machine, or not one that cg knows.
        BindError: a rank of the channels has no device, or would need too many communicators.
    """
    pool = _pools.get(world)
    if pool is None:
        pool = _pools[world] = make_pool(world, library)
    return HcclCommunicator(pool, channels, world.rank)


def make_pool(world: World, library: str | None = None) -> HcclPool:
    """The communicators of this process, none yet.

    Raises:
        TransportError: there is no HCCL on this machine, or not one that cg knows.
    """
    device = world.device
    if device is None:
        return HcclPool(world, None, None)
    return HcclPool(world, device, HcclLibrary(load(library), device, world.rank))


_pools: WeakKeyDictionary[World, HcclPool] = WeakKeyDictionary()
