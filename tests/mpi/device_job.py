"""Runs the main function of another job with a fake device on each rank.

    mpiexec -n 2 python -m tests.mpi.device_job [--slow] [--strict] tests.mpi.pipeline_job 0 2

With `--slow` whatever is put on a side stream takes a millisecond or more. Without `--strict` no
host waits where it need not, so that work which is ordered wrongly shows.

The device's side streams are threads, and its transport is sockets between processes; everything
else is what real devices run with.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from cg.backends.fake import torch_backend
from cg.backends.fake.device import FakeDevice
from cg.launch.world import world as worlds
from tests.backends.devices.patience import PATIENCE


def install(delay: float = 0.0, strict: bool = False) -> FakeDevice:
    """Give this rank a fake device; side streams take `delay` seconds for all they do."""
    world: Any = worlds.world()
    world.device = FakeDevice(world.local_rank, delay, strict, PATIENCE)
    torch_backend.use_for_process(world.device)
    return world.device  # type: ignore[no-any-return]


def main() -> None:
    install(0.0015 if "--slow" in sys.argv else 0.0, "--strict" in sys.argv)
    sys.argv[:] = [word for word in sys.argv[1:] if word not in ("--slow", "--strict")]
    importlib.import_module(sys.argv[0]).main()


if __name__ == "__main__":
    main()
