"""Pipelines of groups under every schedule, in the virtual world, against one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.synthetic_groups import GroupSteps, group_module
from cg.backends.virtual.world import VirtualExecutable
from cg.ir.types import DType
from cg.passes import schedules
from cg.passes.manager import PassManager
from cg.passes.pipelines import default_pipeline

from .group_bodies import Bodies, batch, in_one_process, initial

GROUPS = {
    "pp2.dp2.tp2": GroupSteps(((2, 2), (2, 2))),
    "pp2.dp1.tp2": GroupSteps(((1, 2), (1, 2))),
    "pp4.dp2": GroupSteps(((2, 1),) * 4),
    "3 ranks and 1": GroupSteps((3, 1), rows=48),
    "uneven rows": GroupSteps(((2, 2), 3), rows=5, microbatches=3),
}


def laid(steps: GroupSteps, schedule: str) -> GroupSteps:
    """The groups with stages as a schedule wants them."""
    line = tuple(range(len(steps.groups)))
    homes = {
        "interleaved": line * 2,
        "looped-bfs": line * 2,
        "zb-v": line + line[::-1],
        "dualpipe-v": line + line[::-1],
    }
    return replace(steps, homes=homes.get(schedule, line), dtype=DType.F64)


@pytest.mark.parametrize("schedule", schedules.names())
@pytest.mark.parametrize("name", GROUPS)
def test_a_pipeline_of_groups_learns_as_one_process_does(name: str, schedule: str) -> None:
    steps = laid(GROUPS[name], schedule)
    module = group_module(steps)
    PassManager(default_pipeline(schedules.by_name(schedule)), check=True).run(module)
    whole = initial(steps)
    ranks = [Bodies(steps, rank, whole) for rank in range(module.world)]
    bodies = {rank: each.of(module) for rank, each in enumerate(ranks)}
    world = VirtualExecutable(module, {}, {}, rank_bodies=bodies, poison=True, shuffle=1)
    for _ in range(2):
        x, y = batch(steps)
        outputs = world.run([[x, y]] * module.world)
        loss = in_one_process(steps, whole, x, y)
        for (found,) in outputs:
            torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
    for rank, each in enumerate(ranks):
        for number, found in Bodies(steps, rank, whole).weights.items():
            for mine, expected in zip(each.weights[number].tensors, found.tensors, strict=True):
                torch.testing.assert_close(mine, expected.detach(), rtol=1e-12, atol=1e-9)
