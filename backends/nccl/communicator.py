"""The NCCL communicator: serves the channels between ranks with GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar
from weakref import WeakKeyDictionary

from ...ir.module import Channel
from ..base import World
from ..streams.collectives import Collectives
from ..streams.communicator import StreamCommunicator
from .bindings import load
from .collectives import NcclCollectives
from .pool import NcclPool


class NcclCommunicator(StreamCommunicator):
    """Serves the channels of a plan between ranks with GPUs; making one is collective."""

    collectives: ClassVar[type[Collectives]] = NcclCollectives


def connect(
    world: World, channels: Sequence[Channel], nonblocking: bool = False
) -> NcclCommunicator:
    """NCCL's factory of communicators (`CommunicatorFactory`).

    Args:
        nonblocking: see `make_pool`. What the first call says holds.

    Raises:
        TransportError: no binding of NCCL is installed.
        BindError: a rank of the channels has no device, or would need too many communicators.
    """
    pool = _pools.get(world)
    if pool is None:
        pool = _pools[world] = make_pool(world, nonblocking=nonblocking)
    return NcclCommunicator(pool, channels, world.rank)


def make_pool(world: World, binding: str | None = None, nonblocking: bool = False) -> NcclPool:
    """The communicators of this process, none yet.

    Args:
        binding: `nccl4py` or `cupy`; the first that is installed if None.
        nonblocking: whether NCCL's calls return before they are done; the same on all ranks.

    Raises:
        TransportError: no binding of NCCL is installed.
    """
    device = world.device
    return NcclPool(world, device, None if device is None else load(binding, nonblocking))


_pools: WeakKeyDictionary[World, NcclPool] = WeakKeyDictionary()
