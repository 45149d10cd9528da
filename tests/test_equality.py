"""Compiled training equals a plain PyTorch loop, with all ranks played by one process."""

from __future__ import annotations

import pytest
import torch

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

from .equality import compare_all, comparisons, layouts


@pytest.mark.parametrize(
    "world", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))]
)
def test_losses_and_gradients_are_those_of_a_plain_loop(world: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with use_world(VirtualWorld(world)):
            assert len(compare_all(every=True)) == comparisons(world)
    finally:
        torch.set_num_threads(threads)


def test_every_schedule_is_compared() -> None:
    assert {n for layout in layouts(2, True) for n in layout.schedules} == set(cg.schedules.names())
