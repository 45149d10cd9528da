"""All that HCCL must do, on the ranks of a job: conformance, random steps, training.

    mpiexec -n 2 python -m tests.backends.hccl.suite_job 0 6 [every | less]

The numbers are the seeds of random steps; `every` trains in every schedule, `less` in none,
and has no conformance cases that reduce other types than float32.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

from cg.launch.environment.config import config
from cg.launch.world import world as worlds
from tests.backends.hccl import conformance_job
from tests.equality import compare_all
from tests.mpi import oracle_job

OPERATIONS = (
    "Send",
    "Recv",
    "BatchSendRecv",
    "AllReduce",
    "ReduceScatter",
    "AllGather",
    "Broadcast",
)


def main() -> None:
    torch.set_num_threads(1)
    how = sys.argv[3:]
    del sys.argv[3:]
    world: Any = worlds.world()
    assert world.device.kind == "npu"
    library = ctypes.CDLL(str(config().hccl_library))
    library.mockCalls.restype = ctypes.c_uint64
    parts = {
        "conformance": lambda: conformance_job.main(less=how == ["less"]),
        "random steps": oracle_job.main,
    }
    if how != ["less"]:
        parts["training"] = lambda: train(world.rank, how == ["every"])
    before = dict.fromkeys(OPERATIONS, 0)
    for name, part in parts.items():
        part()
        counts = {each: library.mockCalls(f"Hccl{each}".encode()) for each in OPERATIONS}
        calls = ", ".join(f"{each} {counts[each] - before[each]}" for each in OPERATIONS)
        print(f"rank {world.rank}: {name} called {calls}", flush=True)
        before = counts


def train(rank: int, every: bool) -> None:
    print(f"rank {rank}: {len(compare_all(every))} trainings agree")


if __name__ == "__main__":
    main()
