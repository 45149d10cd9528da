"""Orders of tasks on paper: times, peaks, deadlocks, costs and the rank grid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cg.ir.attributes import Action, Task
from cg.ir.pipeline.costs import Costs, Link
from cg.ir.pipeline.timing import OrderDeadlock, play
from cg.passes import schedules
from cg.passes.schedules import Pipeline
from cg.passes.simulate.rank_grid import grid
from cg.passes.simulate.schedule_simulator import simulate

times = st.integers(0, 9).map(float)


def order_of(*lines: str) -> dict[int, list[Task]]:
    return {rank: [Task.parse(w) for w in line.split()] for rank, line in enumerate(lines)}


def slowly(
    order: Mapping[int, Sequence[Task]], stage_ranks: Sequence[int], costs: Costs, split: bool
) -> dict[Task, tuple[float, float]]:
    """Start and end of each task by going over all ranks until nothing moves."""
    found: dict[Task, tuple[float, float]] = {}
    at = dict.fromkeys(order, 0)
    clock = dict.fromkeys(order, 0.0)
    moved = True
    while moved:
        moved = False
        for rank, tasks in order.items():
            while at[rank] < len(tasks):
                task = tasks[at[rank]]
                step = {Action.FORWARD: -1, Action.BACKWARD: 1, Action.WEIGHT: 0}[task.action]
                other = task.stage + step
                come = 0.0
                if step and 0 <= other < len(stage_ranks):
                    before = Task(other, task.action, task.microbatch)
                    if before not in found:
                        break
                    far = stage_ranks[other] != rank
                    come = found[before][1] + far * costs.between(min(other, task.stage))
                start = max(clock[rank], come)
                clock[rank] = start + costs.of(task.action, task.stage, split)
                found[task] = (start, clock[rank])
                at[rank] += 1
                moved = True
    return found


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 6), st.booleans(), st.data()
)
def test_every_task_runs_when_it_can(
    stage_ranks: list[int], m: int, split: bool, data: st.DataObject
) -> None:
    each = st.lists(times, min_size=len(stage_ranks), max_size=len(stage_ranks)).map(tuple)
    costs = Costs(data.draw(each), data.draw(each), data.draw(each), data.draw(each))
    pipeline = Pipeline(tuple(stage_ranks), m)
    schedule = schedules.auto(costs=costs) if split else schedules.one_f_one_b()
    order = schedule(pipeline)
    timeline = play(order, stage_ranks, m, costs)
    expected = slowly(order, stage_ranks, costs, timeline.split)
    found = {task: (start, end) for rank in order for task, start, end in timeline.tasks(rank)}
    assert found == expected


def test_a_transfer_delays_its_consumer_alone() -> None:
    order = order_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    timeline = play(order, (0, 1), 2, Costs(2.0, 3.0, 1.0, 0.5))
    assert [(str(t), s, e) for t, s, e in timeline.tasks(0)] == [
        ("0F0", 0.0, 2.0),
        ("0F1", 2.0, 4.0),
        ("0B0", 9.0, 13.0),
        ("0B1", 15.0, 19.0),
    ]
    assert [(str(t), s, e) for t, s, e in timeline.tasks(1)] == [
        ("1F0", 2.5, 4.5),
        ("1B0", 4.5, 8.5),
        ("1F1", 8.5, 10.5),
        ("1B1", 10.5, 14.5),
    ]
    assert timeline.span(0) == timeline.makespan == timeline.end == 19.0
    assert timeline.span(1) == 12.0
    assert timeline.busy(0) == timeline.busy(1) == 12.0


def test_stages_of_one_rank_need_no_transfer() -> None:
    order = order_of("0F0 1F0 1B0 0B0")
    assert play(order, (0, 0), 1, Costs(1.0, 1.0, 1.0, 100.0)).makespan == 6.0


def test_a_split_backward_sends_its_gradient_before_w() -> None:
    whole = play(order_of("0F0 0B0", "1F0 1B0"), (0, 1), 1)
    split = play(order_of("0F0 0B0 0W0", "1F0 1B0 1W0"), (0, 1), 1)
    assert (whole.end, split.end) == (6.0, 5.0)


def test_the_makespan_is_the_longest_span_of_a_rank() -> None:
    pipeline = Pipeline((0, 1, 2, 3), 8)
    found = simulate(schedules.zb_h2()(pipeline), pipeline.stage_ranks, 8)
    assert (found.makespan, found.end, found.bubble_ratio) == (24.0, 27.0, 0.0)
    assert found.busy == (24.0,) * 4


def test_the_bubble_is_what_ranks_idle_on_average() -> None:
    costs = Costs(tf=(1.0, 3.0), tb=(1.0, 3.0), tw=(0.0, 0.0))
    found = simulate(order_of("0F0 0B0", "1F0 1B0"), (0, 1), 1, costs)
    assert (found.makespan, found.busy) == (8.0, (2.0, 6.0))
    assert found.bubble_ratio == 0.5


def test_tasks_that_take_no_time_have_no_bubble() -> None:
    found = simulate(order_of("0F0 0B0"), (0,), 1, Costs(0.0, 0.0, 0.0))
    assert (found.makespan, found.bubble_ratio) == (0.0, 0.0)


def test_peaks_weigh_what_w_keeps_and_count_chunks_in_part() -> None:
    order = order_of("0F0 1F0 1B0 0B0 1W0 0W0")
    assert simulate(order, (0, 0), 1, Costs()).peak_activations == (1.0,)
    order = order_of("0F0 0B0 0F1 0B1 0W0 0W1")
    assert simulate(order, (0,), 2, Costs(mw=1.0)).peak_activations == (2.0,)
    assert simulate(order, (0,), 2, Costs(mw=0.25)).peak_activations == (1.25,)
    assert simulate(order, (0,), 2, Costs(mw=0.0)).peak_activations == (1.0,)


def test_an_order_that_cannot_be_run_says_who_waits_for_what() -> None:
    order = order_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    with pytest.raises(OrderDeadlock) as caught:
        simulate(order, (0, 1), 2)
    assert str(caught.value) == (
        "the ranks wait for each other for ever:\n"
        "  rank 0 stays at 0B0, which needs 1B0\n"
        "  rank 1 stays at 1F1, which needs 0F1"
    )


def test_a_long_deadlock_is_cut() -> None:
    p = 12
    lines = ["0F0 0B0 0F1 0B1", *(f"{s}F0 {s}F1 {s}B0 {s}B1" for s in range(1, p))]
    with pytest.raises(OrderDeadlock, match="and so on, 12 ranks in all"):
        simulate(order_of(*lines), range(p), 2)


def test_costs_of_a_rank_are_shared_by_its_stages() -> None:
    costs = Costs(tf=4.0, tb=(1.0, 2.0, 3.0), tw=2.0, tcomm=0.5).shared((0, 1, 0))
    assert costs == Costs((2.0, 4.0, 2.0), (1.0, 2.0, 3.0), (1.0, 2.0, 1.0), 0.5)


def test_the_grid_is_true_to_scale() -> None:
    timeline = play(order_of("0F0 0B0", "1F0 1B0"), (0, 1), 1, Costs(1.0, 1.0, 1.0, 0.5))
    assert grid(timeline) == "0 | 0F0 ................0B0     \n1 | ......1F0 1B0     \n"
    assert grid(timeline, [1]) == "1 | ......1F0 1B0     \n"


def test_the_grid_cuts_names_that_do_not_fit() -> None:
    timeline = play(order_of("0F0 0B0 0W0"), (0,), 1, Costs(0.0, 0.01, 8.0))
    assert grid(timeline) == "0 | 0W0" + " " * 29 + "\n"
    assert grid(play(order_of("0F0 0B0"), (0,), 1, Costs(0.0, 0.0, 0.0))) == "0 | \n"


costs_of_all_kinds = st.builds(
    Costs,
    tf=st.one_of(times, st.lists(times, min_size=1, max_size=3).map(tuple)),
    tcomm=times,
    mw=st.floats(0, 1),
    functions=st.dictionaries(st.sampled_from(["a.f", "b.g"]), times),
    overhead=times,
    post=times,
    buffered=st.booleans(),
    link=st.one_of(st.none(), st.builds(Link, times, st.floats(1, 400))),
    channels=st.dictionaries(st.integers(0, 9), st.builds(Link, times)),
)


@given(costs_of_all_kinds)
def test_costs_survive_json(costs: Costs) -> None:
    assert Costs.from_json(costs.to_json()) == costs


def test_costs_are_saved_and_loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    costs = Costs(tf=2.0, link=Link(0.01, 50.0))
    costs.save(path)
    assert Costs.load(path) == costs
    assert path.read_text() == (
        '{\n  "tf": 2.0,\n  "link": {\n    "latency": 0.01,\n    "bandwidth": 50.0\n  }\n}\n'
    )


def test_a_message_takes_latency_and_bytes() -> None:
    assert Link(0.25, 2.0).time(1_000_000) == 0.75
    assert Link(0.25).time(1_000_000) == 0.25


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "file.json: not JSON: "),
        ("[]", "file.json: costs are an object, not list"),
        (
            '{"tx": 1}',
            "file.json: there is no cost 'tx'; choose from tf, tb, tw, tcomm, mw, activation_b",
        ),
        ('{"tf": -1}', "file.json: costs: tf is -1; it must be finite and not negative"),
        ('{"tf": "1"}', "file.json: costs: tf is '1'; it must be a number"),
        ('{"tb": [1, true]}', "file.json: costs: tb is True; it must be a number"),
        ('{"mw": 2}', "file.json: costs: mw is 2; it is a share of 1"),
        (
            '{"overhead": -1}',
            "file.json: costs: overhead is -1; it must be finite and not negative",
        ),
        ('{"buffered": 1}', "file.json: costs: buffered is 1; it must be true or false"),
        ('{"functions": 3}', "file.json: functions are an object of milliseconds by name"),
        ('{"functions": {"f": -1}}', "functions['f'] is -1"),
        ('{"link": {"speed": 1}}', "file.json: link is an object of latency (ms) and bandwidth"),
        ('{"link": {"bandwidth": 0}}', "bandwidth is 0 GB/s; it must be above 0"),
        ('{"channels": []}', "file.json: channels are an object of links by id"),
        ('{"channels": {"0": 1}}', "channels['0'] is an object of latency (ms)"),
    ],
)
def test_wrong_costs_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"file\.json") as caught:
        Costs.from_json(text, "file.json")
    assert message in str(caught.value)


def test_infinite_costs_are_refused() -> None:
    with pytest.raises(ValueError, match="tw is inf; it must be finite"):
        Costs(tw=math.inf)
