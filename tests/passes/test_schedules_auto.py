"""The search: it keeps to its memory, and is never worse than what is known."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cg.ir.pipeline.costs import Costs
from cg.ir.pipeline.timing import Timeline, play
from cg.passes import schedules
from cg.passes.schedules import Pipeline
from cg.passes.schedules.orders.base import spell
from cg.passes.schedules.orders.zb_h1_order import lagging

from ..sampling import scaled

share = st.sampled_from([0.0, 0.4, 1.0])
times = st.floats(0.1, 3.0)


@st.composite
def costs(draw: st.DrawFn, stages: int) -> Costs:
    """Costs of stages, all the same or each its own."""
    if draw(st.booleans()):
        tf, tb, tw = draw(times), draw(times), draw(times)
        return Costs(tf, tb, tw, draw(st.sampled_from([0.0, 0.3])), draw(share))
    each = st.lists(times, min_size=stages, max_size=stages).map(tuple)
    return Costs(draw(each), draw(each), draw(each), mw=draw(share))


def search(pipeline: Pipeline, memory: float | None, paid: Costs) -> Timeline:
    order = schedules.auto(memory, paid)(pipeline)
    return play(order, pipeline.stage_ranks, pipeline.microbatches, paid)


def most(timeline: Timeline, mw: float) -> float:
    return max(timeline.peak(rank, mw) for rank in timeline.rows)


@settings(max_examples=scaled(60))
@given(st.data(), st.lists(st.integers(0, 3), min_size=1, max_size=7), st.integers(1, 8))
def test_it_keeps_to_its_memory_on_any_ranks(
    data: st.DataObject, stage_ranks: list[int], m: int
) -> None:
    paid = data.draw(costs(len(stage_ranks)))
    memory = data.draw(st.floats(1, 8))
    found = search(Pipeline(tuple(stage_ranks), m), memory, paid)
    assert most(found, paid.mw) <= memory + 1e-6


@settings(max_examples=scaled(60))
@given(st.data(), st.integers(1, 6), st.integers(1, 12), st.integers(1, 12))
def test_it_is_never_worse_than_1f1b_in_its_memory(
    data: st.DataObject, p: int, m: int, memory: int
) -> None:
    pipeline = Pipeline(tuple(range(p)), m)
    paid = data.draw(costs(p))
    found = search(pipeline, memory, paid)
    for known in (schedules.one_f_one_b(), schedules.zb_h1(), schedules.zb_h2()):
        other = play(known(pipeline), pipeline.stage_ranks, m, paid)
        if most(other, paid.mw) <= memory:
            assert found.makespan <= other.makespan + 1e-6
    tight = {
        s: spell(pipeline, [(s,)], lagging(m, min(p - s, memory), 0).replace("W", ""))
        for s in range(p)
    }
    assert found.makespan <= play(tight, pipeline.stage_ranks, m, paid).makespan + 1e-6


def test_more_memory_does_not_make_it_slower() -> None:
    paid = Costs(1.0, 1.1, 0.7, 0.1)
    spans = [
        search(Pipeline(tuple(range(6)), 18), memory, paid).makespan for memory in (2, 4, 6, 12)
    ]
    assert spans == sorted(spans, reverse=True)
    assert spans[-1] < spans[0]


def test_without_a_bound_it_takes_the_memory_of_1f1b() -> None:
    found = search(Pipeline(tuple(range(5)), 20), None, Costs())
    assert most(found, 1.0) <= 5


@pytest.mark.parametrize(
    ("p", "m", "costs", "published"),
    [
        (8, 24, Costs(29.718, 29.444, 19.927, 0.527, mw=0.432), 0.0029),
        (16, 48, Costs(11.347, 11.248, 8.132, 0.377, mw=0.444), 0.0066),
    ],
)
def test_in_twice_the_memory_it_is_as_good_as_published(
    p: int, m: int, costs: Costs, published: float
) -> None:
    """ZB-2p of arXiv 2401.10241; `mw` is 32 h over 34 h + 5 a s of its models."""
    found = search(Pipeline(tuple(range(p)), m), 2 * p, costs)
    assert 1 - found.busy(0) / found.makespan <= published


def test_on_a_v_it_finds_no_bubble_where_there_need_be_none() -> None:
    found = search(Pipeline((0, 1, 2, 3, 3, 2, 1, 0), 12), 4, Costs())
    assert found.makespan == found.busy(0)


@pytest.mark.parametrize("memory", [0.5, 0.0, -1.0, float("nan")])
def test_too_little_memory_is_refused(memory: float) -> None:
    with pytest.raises(ValueError, match=rf"max_activations is {memory}; .* hold at least 1"):
        schedules.auto(memory)(Pipeline((0, 1), 2))


def test_memory_may_be_without_bound() -> None:
    pipeline = Pipeline(tuple(range(4)), 12)
    assert search(pipeline, float("inf"), Costs()).makespan == 36


def test_costs_of_too_few_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="tf is given for 2 stages, and none of them is stage 2"):
        schedules.auto(costs=Costs(tf=(1.0, 2.0)))(Pipeline((0, 1, 2), 2))
