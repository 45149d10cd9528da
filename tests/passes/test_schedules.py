"""Pipeline schedules: their orders against closed forms, and the errors of a wrong one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cg.ir.attributes import Action, Task
from cg.ir.pipeline.timing import play
from cg.passes import schedules
from cg.passes.schedules import Pipeline, Schedule
from cg.passes.schedules.orders.base import ScheduleError

ALL = (schedules.gpipe(), schedules.one_f_one_b())
SIZES = [(1, 1), (1, 5), (2, 1), (4, 2), (4, 4), (4, 6), (5, 8), (8, 24)]

pipelines = st.builds(
    lambda ranks, m: Pipeline(tuple(ranks), m),
    st.lists(st.integers(0, 5), min_size=1, max_size=8),
    st.integers(1, 9),
)


def needs(pipeline: Pipeline, task: Task) -> list[Task]:
    """The tasks that one waits for, in a chain of stages with skip connections everywhere."""
    stage, mb = task.stage, task.microbatch
    if task.action is Action.FORWARD:
        return [Task(s, Action.FORWARD, mb) for s in range(stage)]
    later = range(stage + 1, pipeline.stages)
    return [Task(stage, Action.FORWARD, mb), *(Task(s, Action.BACKWARD, mb) for s in later)]


def simulate(
    pipeline: Pipeline, order: Mapping[int, Sequence[Task]], times: Mapping[Action, int]
) -> dict[Task, int]:
    """When each task ends if every rank runs its tasks in order; raises if they block."""
    ends: dict[Task, int] = {}
    at = dict.fromkeys(order, 0)
    clock = dict.fromkeys(order, 0)
    moved = True
    while moved:
        moved = False
        for rank, tasks in order.items():
            while at[rank] < len(tasks):
                task = tasks[at[rank]]
                before = needs(pipeline, task)
                if any(task not in ends for task in before):
                    break
                start = max([clock[rank], *(ends[task] for task in before)])
                ends[task] = clock[rank] = start + times[task.action]
                at[rank] += 1
                moved = True
    stuck = {rank: str(tasks[at[rank]]) for rank, tasks in order.items() if at[rank] < len(tasks)}
    assert not stuck
    return ends


def peak(tasks: Sequence[Task], stage: int) -> int:
    """The most microbatches that a stage holds between their F and their B."""
    held = most = 0
    for task in tasks:
        if task.stage == stage:
            held += 1 if task.action is Action.FORWARD else -1
            most = max(most, held)
    return most


def spelled(tasks: Sequence[Task]) -> str:
    return " ".join(map(str, tasks))


@given(pipelines)
def test_every_placement_of_stages_can_be_run(pipeline: Pipeline) -> None:
    times = {Action.FORWARD: 1, Action.BACKWARD: 2}
    for schedule in ALL:
        ends = simulate(pipeline, schedule(pipeline), times)
        assert len(ends) == 2 * pipeline.stages * pipeline.microbatches


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("schedule", ALL, ids=lambda s: s.name)
@pytest.mark.parametrize(("tf", "tb"), [(1, 1), (1, 2), (3, 5)])
def test_makespan_is_the_closed_form(schedule: Schedule, p: int, m: int, tf: int, tb: int) -> None:
    pipeline = Pipeline(tuple(range(p)), m)
    times = {Action.FORWARD: tf, Action.BACKWARD: tb}
    ends = simulate(pipeline, schedule(pipeline), times)
    assert max(ends.values()) == (m + p - 1) * (tf + tb)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_holds_all_microbatches_and_1f1b_one_for_each_rank_ahead(p: int, m: int) -> None:
    pipeline = Pipeline(tuple(range(p)), m)
    gpipe = schedules.gpipe()(pipeline)
    one_f_one_b = schedules.one_f_one_b()(pipeline)
    assert [peak(gpipe[s], s) for s in range(p)] == [m] * p
    assert [peak(one_f_one_b[s], s) for s in range(p)] == [min(m, p - s) for s in range(p)]


@given(pipelines)
def test_1f1b_holds_at_most_one_microbatch_for_each_stage_ahead(pipeline: Pipeline) -> None:
    order = schedules.one_f_one_b()(pipeline)
    for stage, rank in enumerate(pipeline.stage_ranks):
        assert peak(order[rank], stage) <= pipeline.stages - stage


def test_orders_are_the_textbook_ones() -> None:
    order = schedules.one_f_one_b()(Pipeline((0, 1, 2), 4))
    assert spelled(order[0]) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert spelled(order[1]) == "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"
    assert spelled(order[2]) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    order = schedules.gpipe()(Pipeline((1, 0), 2))
    assert spelled(order[1]) == "0F0 0F1 0B0 0B1"
    assert spelled(order[0]) == "1F0 1F1 1B0 1B1"


def test_neighbouring_stages_of_a_rank_run_as_one() -> None:
    order = schedules.one_f_one_b()(Pipeline((0, 0, 1, 1), 2))
    assert spelled(order[0]) == "0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1"
    assert spelled(order[1]) == "2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1"


def test_schedules_are_found_by_name() -> None:
    for schedule in ALL:
        assert schedules.by_name(schedule.name) == schedule
    with pytest.raises(ValueError, match=r"no schedule 'zigzag'; choose from gpipe, 1f1b"):
        schedules.by_name("zigzag")


@pytest.mark.parametrize(
    ("ranks", "m", "message"),
    [
        ((), 1, "at least one stage"),
        ((0,), 0, "at least one microbatch, not 0"),
        ((0, -1), 1, "must not be negative"),
    ],
)
def test_impossible_pipelines_are_refused(ranks: tuple[int, ...], m: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pipeline(ranks, m)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("0F0 0B0 0F0", "1F0 1B0", "rank 0 runs 0F0 twice"),
        ("0B0 0F0", "1F0 1B0", "rank 0 runs 0B0 before 0F0"),
        ("0F0", "1F0 1B0", "rank 0 never runs 0B0"),
        ("0F0 0B0 1F0", "1B0", "rank 0 runs 1F0, but stage 1 is on rank 1"),
        ("0F0 0B0", "1F0 1B0 1F1", "runs 1F1, but the pipeline has stages 0..1 and micro"),
        ("0F0 0B0", "1F0 1B0 2F0", "runs 2F0, but the pipeline has stages 0..1 and micro"),
        ("0F0 0B0 0W0", "1F0 1B0", "rank 1 never runs 1W0"),
        ("0F0 0W0 0B0", "1F0 1B0 1W0", "rank 0 runs 0W0 before 0B0; each W has its B, also"),
    ],
)
def test_a_wrong_order_is_refused(first: str, second: str, message: str) -> None:
    order = {r: [Task.parse(t) for t in text.split()] for r, text in enumerate((first, second))}
    with pytest.raises(ScheduleError, match=f"schedule 'mine': .*{message}"):
        Schedule("mine", lambda _: order)(Pipeline((0, 1), 1))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "schedule 'mine' gives None; a rule gives a dict: for each rank the list"),
        ([["0F0", "0B0"]], "gives a value of type list"),
        ({"0": []}, "has '0' for a rank"),
        ({True: []}, "has True for a rank"),
        ({0: "0F0 0B0"}, "gives rank 0 a value of type str"),
        ({0: (task for task in ())}, "gives rank 0 a value of type generator"),
        ({0: ["0F0", "0B0"]}, r"gives rank 0 the task '0F0'; .* Task\.parse\('2F0'\)"),
        ({0: [(0, "F", 0)]}, r"gives rank 0 the task \(0, 'F', 0\)"),
    ],
)
def test_what_is_nothing_like_an_order_is_refused(given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Schedule("mine", lambda _: given)(Pipeline((0,), 1))


def test_a_rule_may_name_ranks_that_have_nothing_to_do() -> None:
    order = {0: [Task.parse(t) for t in ["0F0", "0B0"]], 1: []}
    assert Schedule("mine", lambda _: order)(Pipeline((0,), 1)) == order
    timeline = play(order, (0,), 1)
    assert (timeline.end, timeline.makespan) == (3, 3)


def test_a_schedule_may_split_the_backward() -> None:
    order = {0: [Task.parse(t) for t in ["0F0", "0B0", "0W0"]]}
    assert Schedule("mine", lambda _: order, splits=True)(Pipeline((0,), 1)) == order
    with pytest.raises(ValueError, match=r"'mine' has tasks W.*Schedule\(..., splits=True\)"):
        Schedule("mine", lambda _: order)(Pipeline((0,), 1))


def test_which_schedules_split_the_backward() -> None:
    found = {name for name in schedules.names() if schedules.by_name(name).splits}
    assert found == {"zb-h1", "zb-h2", "zb-v", "dualpipe-v", "auto"}
    assert schedules.table("0F0 0B0 0W0").splits
    assert not schedules.table("0F0 0B0").splits
