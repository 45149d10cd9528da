"""Runs transfers between layouts on the ranks of a job, each compared with numpy.

    mpiexec -n 4 python -m tests.mpi.transfers_job FILE

The file has the pickled types of each transfer, before and after.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cg.backends.cpu.transport import CpuTransport
from cg.backends.program.executor import Executable
from cg.backends.program.linked import LinkedProgram
from cg.ir.phases import Phase
from cg.launch.world import world as worlds
from cg.passes.manager.manager import PassManager
from cg.passes.manager.pipelines import default_pipeline
from tests.backends.conformance import patient
from tests.passes.random_transfers import Types, as_module, check, initial, inputs_of, ranks_of


def main() -> None:
    world: Any = worlds.world()
    transport = CpuTransport(world)
    cases: list[Types] = pickle.loads(Path(sys.argv[1]).read_bytes())
    for seed, types in enumerate(cases):
        try:
            run(world, transport, types, seed)
        except BaseException as error:
            error.add_note(f"rank {world.rank}: {types[0]} becomes {types[1]}")
            raise
    print(f"rank {world.rank}: {len(cases)} of {len(cases)} agree", flush=True)
    transport.close()


def run(world: Any, transport: CpuTransport, types: Types, seed: int) -> None:
    """Run one transfer twice, and compare what this rank has then."""
    module = as_module(types, Phase.TRACED, world.size)
    PassManager(default_pipeline()).run(module)
    held = initial(types[0], seed)
    inputs = [torch.from_numpy(np.array(each)) for each in inputs_of(types, held, world.rank)]
    found: dict[int, Any] = {}

    def take(value: torch.Tensor, rank: torch.Tensor) -> list[None]:
        found[int(rank)] = value.numpy().copy()
        return [None]

    communicator = transport.communicator(world, list(module.channels.values()))
    serving = dict.fromkeys(module.channels, communicator)
    executable = Executable(LinkedProgram(module, world.rank, {"take": take}, {}, serving))
    for _ in range(2):
        found.clear()
        executable.run(inputs, patient(transport.pause, 30.0))
        assert set(found) == {world.rank} & set(ranks_of(types[1]))
        check(types, held, found)
        world.barrier()
    communicator.close()


if __name__ == "__main__":
    main()
