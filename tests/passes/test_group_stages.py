"""To schedules and simulations a group of ranks is one rank."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.synthetic_groups import GroupSteps, group_module
from cg.ir.ops import AllGatherRows, ReduceScatterRows, RowCollective
from cg.ir.ops.module import Module
from cg.ir.pipeline.costs import Costs
from cg.passes import schedules
from cg.passes.manager.manager import PassManager
from cg.passes.manager.pipelines import default_pipeline
from cg.passes.simulate.program_grid import format_grid
from cg.passes.simulate.program_simulator import simulate_programs

STAGES = 3
SIZE = 4
COSTS = Costs(tf=1.0, tb=1.5, tw=0.5, tcomm=0.25)


def compiled(group: tuple[int, int] | int, schedule: str) -> Module:
    module = group_module(GroupSteps((group,) * STAGES, microbatches=5))
    PassManager(default_pipeline(schedules.by_name(schedule))).run(module)
    return module


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-h2", "auto"])
def test_a_group_works_when_a_rank_in_its_place_would(schedule: str) -> None:
    alone, groups = compiled(1, schedule), compiled((2, 2), schedule)
    lines = [line.partition("|")[2] for line in format_grid(alone).splitlines()]
    found = [line.partition("|")[2] for line in format_grid(groups).splitlines()]
    assert found == [line for line in lines for _ in range(SIZE)]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_group_takes_the_time_that_a_rank_would(schedule: str) -> None:
    alone = simulate_programs(compiled(1, schedule), COSTS)
    groups = simulate_programs(compiled((2, 2), schedule), COSTS)
    assert groups.makespan == pytest.approx(alone.makespan)
    assert groups.end == pytest.approx(alone.end)
    busy = [rank.busy for rank in alone.ranks for _ in range(SIZE)]
    assert [rank.busy for rank in groups.ranks] == pytest.approx(busy)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_rows_of_experts_travel_in_each_block(schedule: str) -> None:
    """There and back, forward and backward, but for the gradient of the first block's input."""
    module = group_module(GroupSteps(((2, 2), (2, 2)), microbatches=5, experts=4, rows=8))
    pipeline = default_pipeline(schedules.by_name(schedule), dispatch="exchange")
    PassManager(pipeline).run(module)
    moved = [
        Counter(type(op) for op in program.ops if isinstance(op, RowCollective))
        for program in module.programs
    ]
    # Of each of 5 microbatches 2 blocks; W of a split backward gathers gradients once more.
    gathers = 4 * 5 if schedule == "1f1b" else 6 * 5
    later = Counter({AllGatherRows: gathers, ReduceScatterRows: 4 * 5})
    first = Counter({AllGatherRows: 4 * 5, ReduceScatterRows: 3 * 5})
    assert moved == [first] * 4 + [later] * 4
