"""Device memory and time of one more communicator."""

from __future__ import annotations

import time
from typing import Any

import torch

from cg.backends.nccl.communicator import make_pool
from cg.ir.ops.module import Channel
from cg.launch.world import world as worlds

from .report import Report


def memory(report: Report) -> None:
    """Device memory and time of one more communicator."""
    world: Any = worlds.world()
    pool = make_pool(world)
    free, _ = torch.cuda.mem_get_info()
    began = time.perf_counter()
    pool.join([Channel(0, (0, 1))])
    seconds = time.perf_counter() - began
    after, _ = torch.cuda.mem_get_info()
    report.note(
        "memory",
        f"{pool.library.name} {pool.library.version()}: first edge",
        (free - after) / 2**20,
        "MiB",
    )
    report.note("memory", "to join it", seconds * 1e3, "ms")
    began = time.perf_counter()
    pool.join([Channel(1, (1, 0))])
    report.note("memory", "a second edge", (after - torch.cuda.mem_get_info()[0]) / 2**20, "MiB")
    report.note("memory", "to join it", (time.perf_counter() - began) * 1e3, "ms")
    pool.close()
