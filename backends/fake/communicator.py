"""The communicator of the fake device: serves the channels between ranks that have one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from ...ir.ops.module import Channel
from ..base import World
from ..nccl.communicator import NcclCommunicator
from ..nccl.pool import NcclPool
from ..per_world import PerWorld
from .device import FakeDevice
from .library import FakeLibrary


class FakePool(NcclPool):
    """The communicators of this process, with the limits and the failures of NCCL."""

    library_name: ClassVar[str] = "the fake devices' library"
    device_name: ClassVar[str] = "fake device"
    logs: ClassVar[str] = "that of this rank"


def connect(world: World, channels: Sequence[Channel]) -> NcclCommunicator:
    """The factory of communicators (`CommunicatorFactory`).

    Raises:
        BindError: a rank of the channels has no device, or would need too many communicators.
    """
    return NcclCommunicator(_pools.of(world, partial(_make_pool, world)), channels, world.rank)


def _make_pool(world: World) -> FakePool:
    device = world.device
    library = FakeLibrary(device) if isinstance(device, FakeDevice) else None
    return FakePool(world, device, library)


_pools: PerWorld[FakePool] = PerWorld()
