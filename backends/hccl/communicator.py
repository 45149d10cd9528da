"""The HCCL communicator: serves the channels between ranks with NPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar
from weakref import WeakKeyDictionary

from ...ir.module import Channel
from ...ir.ops import Collective, Recv, Send
from ...ir.types import ValueType
from ..base import Port, World
from ..streams.collectives import Collectives
from ..streams.communicator import StreamCommunicator
from .collectives import HcclCollectives, check_supported
from .library import HcclLibrary
from .pool import HcclPool
from .symbols import Symbols, load


class HcclCommunicator(StreamCommunicator):
    """See `StreamCommunicator`.

    Raises:
        BindError: this version of HCCL has no function for an op.
    """

    collectives: ClassVar[type[Collectives]] = HcclCollectives

    def send_port(self, op: Send, channel: Channel, type_: ValueType) -> Port:
        """See `Communicator`."""
        check_supported(op, self._symbols)
        return super().send_port(op, channel, type_)

    def recv_port(self, op: Recv, channel: Channel, type_: ValueType) -> Port:
        """See `Communicator`."""
        check_supported(op, self._symbols)
        return super().recv_port(op, channel, type_)

    def collective_port(
        self,
        op: Collective,
        channel: Channel,
        operand: ValueType | None,
        result: ValueType,
    ) -> Port:
        """See `Communicator`."""
        check_supported(op, self._symbols)
        return super().collective_port(op, channel, operand, result)

    @property
    def _symbols(self) -> Symbols:
        library = self._pool.library
        assert isinstance(library, HcclLibrary), "the pool was made with one"
        return library.symbols


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
