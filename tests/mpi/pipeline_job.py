"""Runs random pipelines under all schedules on the ranks of a job, each against the plain loop.

    mpiexec -n 4 python -m tests.mpi.pipeline_job 0 12 [every]

With `every` four ranks run all orders that `auto` finds itself, else one of a line and one that
does not split backwards. Every rank draws the same pipelines, and runs each of them plainly by
itself, with its own stages.
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
    first, last = map(int, sys.argv[1:3])
    every = sys.argv[3:] == ["every"]
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
    found = found_orders(world, every) if world == 4 else []
    for pipe, schedule in found:
        check(pipe, schedule)
    if world < 4:
        recomputing = cg.schedules.auto(1.5, cg.Costs(0.3, 1.0, 0.9), remat=True)
        report = check(Pipe((*range(world), *range(world)), 6, shared=True), recomputing)
        assert "recompute" in report, report
    print(f"rank {cg.rank()}: {len(pipes) + len(found) + (world < 4)} agree")


def found_orders(world: int, every: bool) -> list[tuple[Pipe, cg.schedules.Schedule]]:
    """Pipelines with schedules that `auto` finds itself, as no known one is as good."""
    line = tuple(range(world))
    vee, loop = (*line, *reversed(line)), line * 2
    uneven = (1.0, 1.6, 0.7, 1.2)
    search = cg.schedules.auto
    orders = [
        (Pipe(line, 9), search(2 * world, cg.Costs(1.1, 0.9, 0.6, 0.05))),
        (Pipe(line, 10), search(6, cg.Costs(uneven, (0.9, 1.3, 1.0, 1.1), 0.6, 0.1, 0.4))),
        (Pipe(vee, 10), search(6, cg.Costs(0.6, 0.8, 0.4, 0.05))),
        (Pipe(loop, 10), search(2 * world, cg.Costs(0.8, 0.7, 0.5, 0.02))),
        (Pipe(loop, 9), search(5, cg.Costs(0.8, 1.2, 0.5, 0.02), splits=False)),
    ]
    orders = orders if every else [orders[0], orders[-1]]
    for pipe, schedule in orders:
        pipeline = cg.schedules.Pipeline(pipe.ranks, pipe.microbatches)
        best = cg.schedules.found_orders(schedule, pipeline)[0]
        assert best.source == "a search", best
    return orders


def draw(seed: int, world: int) -> Pipe:
    """A pipeline on at most so many ranks, for a world of exactly so many."""
    pipe = draw_pipe(random.Random(seed).randint, world, 2 * world)
    return replace(pipe, microbatches=1 + pipe.microbatches % 8)


def check(pipe: Pipe, schedule: cg.schedules.Schedule | None = None) -> str:
    """Compare losses and gradients on this rank, with a schedule or the one that the pipe names.

    Returns:
        What `auto` says of its choice.
    """
    with use_world(VirtualWorld(cg.world_size())):
        alone = make_stages(pipe)
    expected = make_step(pipe, alone)(*inputs(pipe)).detach()
    wanted = gradients(alone)
    stages = make_stages(pipe)
    lowered = cg.trace(make_step(pipe, stages)).lower(*inputs(pipe))
    compiled = lowered.compile(schedule=schedule or cg.schedules.by_name(pipe.schedule))
    # A device replays what it has captured from the third execution on.
    for _ in range(2 if worlds.world().device is None else 6):
        found = compiled(*inputs(pipe)).cpu()
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        of_stages = {n: None if g is None else g.cpu() for n, g in gradients(stages).items()}
        assert_close(of_stages, wanted, 1e-10)
    compiled.close()
    return compiled.schedule_report


if __name__ == "__main__":
    main()
