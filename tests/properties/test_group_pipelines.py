"""Pipelines of groups under every schedule, in the virtual world, against one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.synthetic_groups import GroupSteps, group_module
from cg.backends.virtual.world import VirtualExecutable
from cg.ir.types import DType
from cg.passes import schedules
from cg.passes.manager.manager import PassManager
from cg.passes.manager.pipelines import default_pipeline

from ..sampling import examples
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


@pytest.mark.grid(2)
@pytest.mark.parametrize("schedule", schedules.names())
@pytest.mark.parametrize("name", GROUPS)
def test_a_pipeline_of_groups_learns_as_one_process_does(name: str, schedule: str) -> None:
    learns(laid(GROUPS[name], schedule), schedule, shuffle=1)


@st.composite
def pipelines(draw: st.DrawFn) -> GroupSteps:
    """Two or three small groups, meshes or bare; `tp` cuts the hidden units evenly."""
    grid = st.sampled_from([(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (2, 2)])
    groups = draw(st.lists(st.integers(1, 3) | grid, min_size=2, max_size=3))
    return GroupSteps(
        tuple(groups),
        microbatches=2 * draw(st.integers(1, 2)),
        rows=draw(st.integers(1, 5)),
        tokens=draw(st.integers(1, 2)),
        width=draw(st.integers(1, 4)),
        hidden=6 * draw(st.integers(1, 2)),
    )


@given(
    steps=pipelines(),
    schedule=st.sampled_from(schedules.names()),
    shuffle=st.integers(0, 99),
    tasks=st.integers(1, 3),
)
@examples(60)
def test_a_random_pipeline_of_groups_learns_as_one_process_does(
    steps: GroupSteps, schedule: str, shuffle: int, tasks: int
) -> None:
    """Up to three tasks of a rank are in flight, so summands travel beside other tasks."""
    learns(laid(steps, schedule), schedule, shuffle, count=1, tasks=tasks)


def learns(steps: GroupSteps, schedule: str, shuffle: int, count: int = 2, tasks: int = 1) -> None:
    """Take steps under a schedule, and compare losses and weights with one process."""
    module = group_module(steps)
    pipeline = default_pipeline(schedules.by_name(schedule), tasks_in_flight=tasks)
    PassManager(pipeline, check=True).run(module)
    whole = initial(steps)
    ranks = [Bodies(steps, rank, whole) for rank in range(module.world)]
    bodies = {rank: each.of(module) for rank, each in enumerate(ranks)}
    world = VirtualExecutable(module, {}, {}, rank_bodies=bodies, poison=True, shuffle=shuffle)
    for _ in range(count):
        x, y = batch(steps)
        outputs = world.run([[x, y]] * module.world)
        loss = in_one_process(steps, whole, x, y)
        for (found,) in outputs:
            torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
    for rank, each in enumerate(ranks):
        for number, found in Bodies(steps, rank, whole).weights.items():
            for mine, expected in zip(each.weights[number].tensors, found.tensors, strict=True):
                wanted = expected.detach()
                atol = 1e-12 * max(1.0, float(wanted.abs().max()))  # numbers grow with each block
                torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=atol)
