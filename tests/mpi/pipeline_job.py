"""Runs random pipelines under all schedules on the ranks of a job, each against the plain loop.

    mpiexec -n 4 python -m tests.mpi.pipeline_job 0 12

Every rank draws the same pipelines, and runs each of them plainly by itself, with its own stages.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from typing import Any

import torch

import cg
from cg.backends.virtual import VirtualWorld
from cg.launch.world import use_world
from tests.properties.pipelines import (
    Pipe,
    Stage,
    assert_close,
    draw_pipe,
    gradients,
    inputs,
    make_step,
)


def main() -> None:
    first, last = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    world = cg.world_size()
    pipes = [Pipe(tuple(range(world)), 5, schedule="zb-h1", tied=True)]
    pipes += [Pipe(tuple(range(world)), world - 1, schedule="zb-h2", embeds=True)]
    pipes += [Pipe((*range(world), *reversed(range(world))), 6, schedule="zb-v")]
    pipes += [draw(seed, world) for seed in range(first, last)]
    for pipe in pipes:
        try:
            check(pipe)
        except BaseException as error:
            error.add_note(str(pipe))
            raise
    print(f"rank {cg.rank()}: {len(pipes)} agree")


def draw(seed: int, world: int) -> Pipe:
    """A pipeline on at most so many ranks, for a world of exactly so many."""
    pipe = draw_pipe(random.Random(seed).randint, world, 2 * world)
    return replace(pipe, microbatches=1 + pipe.microbatches % 8)


def check(pipe: Pipe) -> None:
    """Compare losses and gradients on this rank."""
    with use_world(VirtualWorld(cg.world_size())):
        alone: list[Any] = [Stage.on(rank)(i) for i, rank in enumerate(pipe.ranks)]
    expected = make_step(pipe, alone)(*inputs(pipe)).detach()
    wanted = gradients(alone)
    stages: list[Any] = [Stage.on(rank)(i) for i, rank in enumerate(pipe.ranks)]
    lowered = cg.trace(make_step(pipe, stages)).lower(*inputs(pipe))
    compiled = lowered.compile(schedule=cg.schedules.by_name(pipe.schedule))
    for _ in range(2):
        torch.testing.assert_close(compiled(*inputs(pipe)), expected, rtol=1e-12, atol=0)
        assert_close(gradients(stages), wanted, 1e-10)
    compiled.close()


if __name__ == "__main__":
    main()
