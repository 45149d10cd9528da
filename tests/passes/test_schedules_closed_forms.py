"""Makespans and peaks of schedules on paper against the closed forms of the papers."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cg.ir.attributes import Action
from cg.ir.pipeline.costs import Costs
from cg.ir.pipeline.timing import play
from cg.passes import schedules
from cg.passes.schedules import Pipeline, Schedule

times = st.integers(1, 1000).map(float)
ranks = st.integers(1, 8)
counts = st.integers(1, 24)


def bubble(schedule: Schedule, stage_ranks: tuple[int, ...], m: int, costs: Costs) -> float:
    """The makespan less the work of a rank; `costs` are those of a whole rank."""
    order = schedule(Pipeline(stage_ranks, m))
    timeline = play(order, stage_ranks, m, costs.shared(stage_ranks))
    assert isinstance(costs.tf, float)
    assert isinstance(costs.tb, float)
    assert isinstance(costs.tw, float)
    return timeline.makespan - m * (costs.tf + costs.tb + costs.tw)


@given(ranks, counts, times, times, times, st.sampled_from(["gpipe", "1f1b"]))
def test_gpipe_and_1f1b(p: int, m: int, tf: float, tb: float, tw: float, name: str) -> None:
    found = bubble(schedules.by_name(name), tuple(range(p)), m, Costs(tf, tb, tw))
    assert found == (p - 1) * (tf + tb + tw)


@given(ranks, counts, st.integers(1, 4), times, times, times)
def test_chunks_divide_the_bubble_once_each_rank_has_a_microbatch(
    p: int, m: int, v: int, tf: float, tb: float, tw: float
) -> None:
    assume(m >= p)
    for schedule in (schedules.interleaved(v), schedules.looped_bfs(v)):
        found = bubble(schedule, tuple(range(p)) * v, m, Costs(tf, tb, tw))
        assert found == pytest.approx((p - 1) * (tf + tb + tw) / v, abs=1e-6)


@given(ranks, counts, times, times, times)
def test_zb_h1_if_w_is_no_longer_than_f(p: int, m: int, tf: float, tb: float, tw: float) -> None:
    assume(m >= p)
    tw = min(tw, tf)
    found = bubble(schedules.zb_h1(), tuple(range(p)), m, Costs(tf, tb, tw))
    assert found == (p - 1) * (tf + tb - tw)


@given(ranks, counts, times, times, times)
def test_zb_h2_if_w_is_no_longer_than_f_and_b(
    p: int, m: int, tf: float, tb: float, tw: float
) -> None:
    assume(m >= 2 * p - 1)
    tw = min(tw, tf, tb)
    found = bubble(schedules.zb_h2(), tuple(range(p)), m, Costs(tf, tb, tw))
    assert found == (p - 1) * (tf + tb - 2 * tw)


@given(ranks, st.integers(1, 32), times)
def test_zb_v_has_no_bubble_at_equal_times(p: int, m: int, time: float) -> None:
    assume(m >= 2 * p - 1)
    stage_ranks = tuple(range(p)) + tuple(range(p))[::-1]
    costs = Costs(time, time, time)
    assert bubble(schedules.zb_v(), stage_ranks, m, costs) == pytest.approx(0, abs=1e-6)


@given(ranks, st.integers(1, 32), times)
def test_dualpipe_v_is_idle_for_half_an_action_a_rank(p: int, m: int, time: float) -> None:
    assume(m >= 2 * p)
    stage_ranks = tuple(range(p)) + tuple(range(p))[::-1]
    costs = Costs(time, time, time)
    assert bubble(schedules.dualpipe_v(), stage_ranks, m, costs) == pytest.approx(
        (p - 1) * time / 2
    )


shares = st.sampled_from([0.0, 0.25, 0.5, 1.0])


def peaks(schedule: Schedule, stage_ranks: tuple[int, ...], m: int, mw: float = 1.0) -> list[float]:
    """For each rank, of how many microbatches it holds the activations at most."""
    timeline = play(schedule(Pipeline(stage_ranks, m)), stage_ranks, m)
    return [timeline.peak(rank, mw) for rank in sorted(set(stage_ranks))]


@given(ranks, counts)
def test_peaks_of_whole_backwards(p: int, m: int) -> None:
    line = tuple(range(p))
    assert peaks(schedules.gpipe(), line, m) == [m] * p
    assert peaks(schedules.one_f_one_b(), line, m) == [min(p - s, m) for s in line]


@given(ranks, counts, st.integers(1, 4))
def test_peaks_of_looped_bfs(p: int, m: int, v: int) -> None:
    assert peaks(schedules.looped_bfs(v), tuple(range(p)) * v, m) == [m] * p


@given(st.integers(2, 8), st.integers(1, 3), st.integers(1, 4))
def test_peaks_of_interleaved(p: int, rounds: int, v: int) -> None:
    stage_ranks, m = tuple(range(p)) * v, p * rounds
    # Narayanan et al., arXiv 2104.04473: 2 (p - s - 1) + (v - 1) p chunks before the first B.
    ahead = [min(2 * (p - s - 1) + (v - 1) * p + 1, m * v) for s in range(p)]
    assert peaks(schedules.interleaved(v), stage_ranks, m) == pytest.approx([n / v for n in ahead])


@given(ranks, counts, shares)
def test_peaks_of_zb_h1_hold_some_of_it_from_b_to_w(p: int, m: int, mw: float) -> None:
    assume(m >= p)
    found = peaks(schedules.zb_h1(), tuple(range(p)), m, mw)
    assert found == pytest.approx([p - s + s * mw for s in range(p)])


@given(ranks, counts)
def test_peaks_of_zb_h2_and_zb_v(p: int, m: int) -> None:
    line = tuple(range(p))
    assert peaks(schedules.zb_h2(), line, m) == [min(2 * p - 1, m)] * p
    assert max(peaks(schedules.zb_v(), line + line[::-1], m)) <= p
    if m >= p:
        assert max(peaks(schedules.zb_v(), line + line[::-1], m)) == p


@given(ranks, st.integers(1, 32))
def test_peaks_of_dualpipe_v(p: int, m: int) -> None:
    assume(m >= 2 * p)
    line = tuple(range(p))
    assert max(peaks(schedules.dualpipe_v(), line + line[::-1], m)) == p + 0.5


@given(ranks, counts, times, times, times, times, st.sampled_from(["1f1b", "zb-h1", "zb-h2"]))
def test_the_first_backward_takes_its_way_back(
    p: int, m: int, tf: float, tb: float, tw: float, tcomm: float, name: str
) -> None:
    """The first rank is idle before its first B for no less than the way down and up takes."""
    line, costs = tuple(range(p)), Costs(tf, tb, tw, tcomm)
    timeline = play(schedules.by_name(name)(Pipeline(line, m)), line, m, costs)
    starts = [(task, start) for task, start, _ in timeline.tasks(0)]
    ahead = next(i for i, (task, _) in enumerate(starts) if task.action is Action.BACKWARD)
    idle = starts[ahead][1] - ahead * tf
    back = tb if timeline.split else tb + tw
    assert idle >= max(0.0, (p - 1) * (back + 2 * tcomm) + (p - ahead) * tf)
    if name == "1f1b":
        assert idle == (p - 1) * (back + 2 * tcomm) + (p - ahead) * tf


@pytest.mark.parametrize(
    ("p", "m", "costs", "one_f_one_b", "zb_h1", "zb_h2"),
    [
        (8, 24, Costs(18.522, 18.086, 9.337, 0.601), 0.2431, 0.1585, 0.1083),
        (8, 24, Costs(29.718, 29.444, 19.927, 0.527), 0.2347, 0.1323, 0.0698),
        (16, 48, Costs(11.347, 11.248, 8.132, 0.377), 0.2552, 0.1397, 0.0672),
        (32, 96, Costs(10.419, 10.207, 7.715, 0.408), 0.2646, 0.1421, 0.0641),
    ],
)
def test_published_bubble_rates_of_measured_costs(
    p: int, m: int, costs: Costs, one_f_one_b: float, zb_h1: float, zb_h2: float
) -> None:
    """Bubble rates and the costs behind them as in arXiv 2401.10241, for four models."""
    stage_ranks = tuple(range(p))
    for schedule, published in (
        (schedules.one_f_one_b(), one_f_one_b),
        (schedules.zb_h1(), zb_h1),
        (schedules.zb_h2(), zb_h2),
    ):
        timeline = play(schedule(Pipeline(stage_ranks, m)), stage_ranks, m, costs)
        found = 1 - timeline.busy(0) / timeline.makespan
        assert found == pytest.approx(published, abs=5e-5)
