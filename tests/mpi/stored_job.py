"""Trains models whose parameters are stored in pieces, on devices; compares them with one process.

Four steps each, so that the last ones are replayed as graphs. Words name the models; see `stored`
in groups_job.py.

mpiexec -n 4 python -m tests.mpi.device_job tests.mpi.stored_job step task auto uneven
"""

from __future__ import annotations

import sys

import torch

import cg
from cg.ir.attributes import Stream
from tests.mpi.groups_job import stored
from tests.tracer.groups.training import batch, compile_step, run_steps


def main() -> None:
    torch.set_num_threads(1)
    models = stored()
    for name in sys.argv[1:]:
        model, places, rows, width, schedule, fsdp = models[name]
        stages = model.on(places, store=cg.cut(0, "dp"))
        compiled = compile_step(stages, batch(0, rows, "reals", width), 2, schedule, fsdp)
        run_steps(compiled, model, stages, rows, 2, "reals", 4, width)
        streams = {op.stream for op in compiled.module.program_of(cg.rank()).ops}
        if cg.rank() in {rank for stage in stages for rank in stage.place.ranks}:
            assert {Stream.GATHER, Stream.REDUCE} <= streams, streams
        print(f"{name} agrees on rank {cg.rank()}")


if __name__ == "__main__":
    main()
