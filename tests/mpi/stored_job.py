"""Trains models whose parameters are stored in pieces, on devices; compares them with one process.

Four steps each, so that the last ones are replayed as graphs.

mpiexec -n 4 python -m tests.mpi.device_job tests.mpi.stored_job
"""

from __future__ import annotations

import torch

import cg
from cg.ir.attributes import Stream
from tests.mpi.groups_job import stored
from tests.tracer.groups.training import batch, step_of, train


def main() -> None:
    torch.set_num_threads(1)
    for name, (model, places, rows, width, schedule, fsdp) in stored().items():
        stages = model.on(places, store=cg.cut(0, "dp"))
        train(model, stages, rows, 2, schedule, "reals", steps=4, width=width, fsdp=fsdp)
        compiled = cg.trace(step_of(stages, 2)).lower(*batch(0, rows, "reals", width)).compile()
        streams = {op.stream for op in compiled.module.program_of(cg.rank()).ops}
        if cg.rank() in {rank for stage in stages for rank in stage.place.ranks}:
            assert {Stream.GATHER, Stream.REDUCE} <= streams, streams
        print(f"{name} agrees on rank {cg.rank()}")


if __name__ == "__main__":
    main()
