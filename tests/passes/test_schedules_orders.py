"""All schedules on all sizes: they are valid, they can be run, and they look as documented."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cg.ir.attributes import Action
from cg.ir.pipeline.order import splits_backward
from cg.ir.pipeline.timing import play
from cg.passes import schedules
from cg.passes.schedules import Pipeline, Schedule

from .pictures import picture

LINE = ("gpipe", "1f1b", "zb-h1", "zb-h2")
LOOP = ("interleaved", "looped-bfs")
VEE = ("zb-v", "dualpipe-v")
SPLIT = ("zb-h1", "zb-h2", "zb-v", "dualpipe-v")


def line(p: int) -> tuple[int, ...]:
    return tuple(range(p))


def vee(p: int) -> tuple[int, ...]:
    return line(p) + line(p)[::-1]


def peaks(schedule: Schedule, stage_ranks: tuple[int, ...], m: int) -> list[float]:
    """The most microbatches that each rank holds."""
    timeline = play(schedule(Pipeline(stage_ranks, m)), stage_ranks, m)
    return [timeline.peak(rank) for rank in dict.fromkeys(stage_ranks)]


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("name", LINE + VEE)
def test_every_size_can_be_run(name: str, p: int) -> None:
    stage_ranks = vee(p) if name in VEE else line(p)
    for m in range(1, 17):
        order = schedules.by_name(name)(Pipeline(stage_ranks, m))
        timeline = play(order, stage_ranks, m)
        assert splits_backward(order) is (name in SPLIT)
        actions = 3 if name in SPLIT else 2
        assert sum(map(len, timeline.starts.values())) == actions * len(stage_ranks) * m


@pytest.mark.parametrize("chunks", range(1, 5))
@pytest.mark.parametrize("name", LOOP)
def test_every_number_of_chunks_can_be_run(name: str, chunks: int) -> None:
    for p in range(1, 9):
        for m in range(1, 17):
            stage_ranks = line(p) * chunks
            timeline = play(schedules.by_name(name)(Pipeline(stage_ranks, m)), stage_ranks, m)
            assert sum(map(len, timeline.starts.values())) == 2 * p * m * chunks


@given(
    st.permutations(range(5)),
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from(schedules.names()),
)
def test_ranks_may_have_any_numbers(numbers: list[int], p: int, m: int, name: str) -> None:
    ranks = tuple(number + 2 for number in numbers[:p])
    stage_ranks = ranks + ranks[::-1] if name in VEE else ranks * (1 + (name in LOOP))
    order = schedules.by_name(name)(Pipeline(stage_ranks, m))
    plain = {old: new for new, old in enumerate(ranks)}
    relabelled = tuple(plain[rank] for rank in stage_ranks)
    expected = schedules.by_name(name)(Pipeline(relabelled, m))
    assert {plain[rank]: list(tasks) for rank, tasks in order.items()} == {
        rank: list(tasks) for rank, tasks in expected.items()
    }


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "auto"])
def test_neighbouring_stages_of_a_rank_run_as_one(name: str) -> None:
    single = schedules.by_name(name)(Pipeline((0, 1), 2))
    double = schedules.by_name(name)(Pipeline((0, 0, 1, 1), 2))
    for rank, tasks in single.items():
        expected = []
        for task in tasks:
            first = 2 * task.stage
            down = task.action is Action.FORWARD
            for stage in (first, first + 1) if down else (first + 1, first):
                expected.append(f"{stage}{task.action.value}{task.microbatch}")
        assert [str(task) for task in double[rank]] == expected


@pytest.mark.parametrize("p", range(1, 9))
def test_peaks_are_those_of_the_closed_forms(p: int) -> None:
    m = 3 * p
    assert peaks(schedules.gpipe(), line(p), m) == [m] * p
    assert peaks(schedules.one_f_one_b(), line(p), m) == [p - s for s in range(p)]
    assert peaks(schedules.zb_h1(), line(p), m) == [p] * p
    assert peaks(schedules.zb_h2(), line(p), m) == [2 * p - 1] * p
    assert peaks(schedules.zb_v(), vee(p), m) == [p] * p
    assert peaks(schedules.dualpipe_v(), vee(p), m) == [p + 0.5] * p
    assert peaks(schedules.looped_bfs(), line(p) * 3, m) == [m] * p


@pytest.mark.parametrize("p", range(1, 9))
def test_between_b_and_w_zb_h1_holds_s_microbatches(p: int) -> None:
    order = schedules.zb_h1()(Pipeline(line(p), 3 * p))
    timeline = play(order, line(p), 3 * p)
    for s in range(p):
        assert timeline.peak(s, mw=0.5) == (p - s) + 0.5 * s


@pytest.mark.parametrize("name", LINE + LOOP + VEE)
def test_documentation_shows_the_order(name: str) -> None:
    schedule = schedules.by_name(name)
    stage_ranks = vee(4) if name in VEE else line(4) * (1 + (name in LOOP))
    drawn = picture(schedule, Pipeline(stage_ranks, 8))
    assert drawn in inspect.cleandoc(schedule.order.__doc__ or "").replace("\n    ", "\n")


@pytest.mark.parametrize("name", schedules.names())
def test_a_schedule_is_a_short_function(name: str) -> None:
    lines, _ = inspect.getsourcelines(schedules.by_name(name).order)
    assert len(lines) < 70


@pytest.mark.parametrize(
    ("schedule", "stage_ranks", "message"),
    [
        (
            schedules.zb_h1(),
            (0, 1, 0, 1),
            "'zb-h1' wants the stages of a rank side by side, .*0,1,0,1",
        ),
        (schedules.zb_h2(), (0, 1, 0), "'zb-h2' wants the stages of a rank side by side"),
        (schedules.interleaved(2), (0, 1, 2), "2 chunks on each of 3 ranks, 6 stages, .* 0,1,2"),
        (schedules.interleaved(), (0, 1, 1, 0), "'interleaved' wants chunks on each of 2 ranks"),
        (schedules.looped_bfs(1), (0, 1, 0, 1), "1 chunk on each of 2 ranks, 2 stages"),
        (schedules.zb_v(), (0, 1, 0, 1), "2 stages on each of 2 ranks, 4 stages, .*as in 0,1,1,0"),
        (schedules.dualpipe_v(), (0, 1), "'dualpipe-v' wants 2 stages on each of 2 ranks"),
    ],
)
def test_stages_that_lie_otherwise_are_refused(
    schedule: Schedule, stage_ranks: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(Pipeline(stage_ranks, 4))


def test_names_are_those_of_the_factories() -> None:
    assert schedules.names() == [
        "gpipe",
        "1f1b",
        "interleaved",
        "looped-bfs",
        "zb-h1",
        "zb-h2",
        "zb-v",
        "dualpipe-v",
        "auto",
    ]
    for name in schedules.names():
        assert schedules.by_name(name) == schedules.by_name(name)
        assert schedules.by_name(name).name == name
