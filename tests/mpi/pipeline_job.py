"""Runs random pipelines under all schedules on the ranks of a job, each against the plain loop.

    mpiexec -n 4 python -m tests.mpi.pipeline_job 0 12

Every rank draws the same pipelines, and runs each of them plainly by itself, with its own stages.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace

import torch

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world import world as worlds
from cg.launch.world.world import use_world
from tests.properties.pipelines import (
    Pipe,
    assert_close,
    draw_pipe,
    gradients,
    inputs,
    make_stages,
    make_step,
)


def main() -> None:
    first, last = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    world = cg.world_size()
    pipes = [Pipe(tuple(range(world)), 5, schedule="zb-h1", tied=True)]
    pipes += [Pipe(tuple(range(world)), world - 1, schedule="zb-h2", embeds=True)]
    pipes += [Pipe((*range(world), *reversed(range(world))), 6, schedule="zb-v")]
    mixed = Pipe(tuple(range(world)), 4, several=True, frozen=(1, *(2,) * (world - 2), 0))
    pipes += [
        replace(mixed, schedule="auto"),
        replace(mixed, shared=True, ranks=(0, 1, 0, 1), frozen=()),
    ]
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
        alone = make_stages(pipe)
    expected = make_step(pipe, alone)(*inputs(pipe)).detach()
    wanted = gradients(alone)
    stages = make_stages(pipe)
    lowered = cg.trace(make_step(pipe, stages)).lower(*inputs(pipe))
    compiled = lowered.compile(schedule=cg.schedules.by_name(pipe.schedule))
    # A device replays what it has captured from the third execution on.
    for _ in range(2 if worlds.world().device is None else 6):
        found = compiled(*inputs(pipe)).cpu()
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        of_stages = {n: None if g is None else g.cpu() for n, g in gradients(stages).items()}
        assert_close(of_stages, wanted, 1e-10)
    compiled.close()


if __name__ == "__main__":
    main()
