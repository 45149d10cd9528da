"""Runs the main function of another job with a fake device on each rank.

    mpiexec -n 2 python -m tests.mpi.device_job [--slow] tests.mpi.pipeline_job 0 2

With `--slow` whatever is put on a side stream takes a millisecond or more.

The device's side streams are threads, and its transport is sockets between processes; everything
else is what real devices run with.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from cg.backends.base import World
from cg.backends.nccl.communicator import NcclCommunicator
from cg.backends.nccl.pool import NcclPool
from cg.backends.registry import register
from cg.ir.module import Channel
from cg.launch.world import world as worlds
from tests.backends.devices.fakes import FakeDevice, FakeLibrary

pools: dict[World, NcclPool] = {}


def connect(world: World, channels: Sequence[Channel]) -> NcclCommunicator:
    """The factory of the fake transport."""
    if world not in pools:
        device: Any = world.device
        pools[world] = NcclPool(world, device, FakeLibrary(device))
    return NcclCommunicator(pools[world], channels, world.rank)


def install(delay: float = 0.0) -> FakeDevice:
    """Give this rank a fake device; side streams take `delay` seconds for all they do."""
    world: Any = worlds.world()
    world.device = FakeDevice(world.local_rank, delay)
    register("fake", connect)
    return world.device  # type: ignore[no-any-return]


def main() -> None:
    slow = "--slow" in sys.argv
    install(0.0015 if slow else 0.0)
    sys.argv[:] = [word for word in sys.argv[1:] if word != "--slow"]
    importlib.import_module(sys.argv[0]).main()


if __name__ == "__main__":
    main()
