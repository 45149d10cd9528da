"""The search behind `auto`: its bound, its memory, its optima, and many microbatches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import count, product
from math import ceil
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cg.ir.pipeline.costs import Costs
from cg.ir.pipeline.timing import play
from cg.passes import schedules
from cg.passes.schedules import Found, Pipeline, validate
from cg.passes.schedules.search import find_orders as search
from cg.passes.schedules.search.bound import find_windows, lower_bound
from cg.passes.schedules.search.improve import Search
from cg.passes.schedules.search.known_orders import known_orders
from cg.passes.schedules.search.list_scheduling import Rule, list_schedule
from cg.passes.schedules.search.policies import SEEDS, drawn
from cg.passes.schedules.search.problem import ROUNDING, OrderProblem
from cg.passes.schedules.search.stretch import fewer_microbatches, stretched

from ..sampling import examples, scale

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "auto_search.json"

times = st.sampled_from([0.0, 0.5, 0.8, 1.0, 1.3, 2.0])
may = st.booleans()


def best(pipeline: Pipeline, memory: float, costs: Costs, **options: Any) -> Found:
    found = schedules.found_orders(schedules.auto(memory, costs, **options), pipeline)
    validate(pipeline, found[0].order, "auto")
    return found[0]


def fits(problem: OrderProblem, lanes: Sequence[Sequence[int]]) -> bool:
    """Whether no rank exceeds its memory if it runs its lanes in this order."""
    for word, capacity in zip(lanes, problem.capacities, strict=True):
        held = 0.0
        limit = capacity * (1.0 + ROUNDING) + ROUNDING
        for lane in word:
            action, k = divmod(lane, problem.parts)
            if action == 1 and held + problem.needs[k] > limit:
                return False
            held += problem.grows[lane]
            if held > limit:
                return False
    return True


@st.composite
def problems(draw: st.DrawFn) -> tuple[OrderProblem, Costs]:
    """Small pipelines in a line, a V, a loop or anyhow, with costs of their own for each stage."""
    p, m = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    line = tuple(range(p))
    ranks = draw(
        st.sampled_from([line, line + line[::-1], line * 2])
        | st.lists(st.integers(0, p), min_size=1, max_size=5).map(tuple)
    )
    each = st.tuples(*[times] * len(ranks))
    remat = tuple(sorted(draw(st.sets(st.integers(0, len(ranks) - 1))))) if draw(may) else ()
    in_bytes = draw(may)
    costs = Costs(
        *(draw(each), draw(each), draw(each), draw(times)),
        mw=draw(st.sampled_from([0.4, 1])),
        activation_bytes=2.0 if in_bytes else None,
        weight_bytes=draw(st.sampled_from([None, 0.8, 5.0])) if in_bytes else None,
        mr=draw(st.sampled_from([0.0, 0.2, 0.7, 1.0])),
        remat=remat,
    )
    room = draw(st.sampled_from([1, 1.5, 2, 4, 8])) * (2 * len(ranks) if in_bytes else 1)
    problem = OrderProblem.of(Pipeline(ranks, m), costs, room)
    assume(not problem.lacking())
    return problem, costs


@examples(150, shrinks=True)
@given(problems(), st.randoms(use_true_random=False))
def test_no_order_is_under_the_bound_nor_over_the_memory(
    drawn: tuple[OrderProblem, Costs], random: Random
) -> None:
    problem, costs = drawn
    pipeline = problem.pipeline
    bound = lower_bound(problem)
    urgency = [
        [random.random() for _ in range(pipeline.microbatches)] for _ in range(3 * problem.parts)
    ]
    patience = random.choice((0.0, 0.5, 1.0))
    listed = list_schedule(problem, Rule(urgency, (patience,) * 3, random.choice((0.0, 1.0))))
    orders = [order for _, order in known_orders(problem)]
    windows = find_windows(problem)
    rules = [policy.rule(problem, policy.urgency(problem, windows)) for policy in SEEDS[:3]]
    for one in (listed, *(list_schedule(problem, rule) for rule in rules)):
        if one is not None:
            assert fits(problem, one.lanes)
            orders.append(problem.order(one.lanes))
    for order in orders:
        timeline = play(order, pipeline.stage_ranks, pipeline.microbatches, costs)
        held = [timeline.held(rank, costs) for rank in pipeline.ranks]
        if all(h <= c + 1e-6 for h, c in zip(held, problem.capacities, strict=True)):
            assert timeline.makespan >= bound - 1e-6


@examples(100)
@given(problems(), st.randoms(use_true_random=False))
def test_a_list_schedule_starts_its_tasks_when_play_does(
    drawn: tuple[OrderProblem, Costs], random: Random
) -> None:
    problem, costs = drawn
    m = problem.microbatches
    urgency = [[random.random() for _ in range(m)] for _ in range(3 * problem.parts)]
    listed = list_schedule(problem, Rule(urgency, (0.0, 0.0, 0.0)))
    if listed is not None:
        pipeline = problem.pipeline
        timeline = play(problem.order(listed.lanes), pipeline.stage_ranks, m, costs)
        assert max(listed.spans(problem)) == pytest.approx(timeline.makespan)


@examples(100)
@given(problems(), st.randoms(use_true_random=False))
def test_only_schedules_that_are_too_long_are_given_up(
    drawn: tuple[OrderProblem, Costs], random: Random
) -> None:
    problem, _ = drawn
    urgency = [
        [random.random() for _ in range(problem.microbatches)] for _ in range(3 * problem.parts)
    ]
    rule = Rule(urgency, (0.5, 0.0, 0.5))
    listed = list_schedule(problem, rule)
    if listed is None:
        return
    span = max(listed.spans(problem))
    assert list_schedule(problem, rule, span) == listed
    shorter = list_schedule(problem, rule, 0.9 * span)
    idle = span - max(problem.microbatches * problem.work(r) for r in range(problem.ranks))
    if idle > 1e-6:
        assert shorter is None


@examples(60)
@given(problems(), st.randoms(use_true_random=False))
def test_a_climb_is_no_longer_than_what_it_is_known_to_begin_with(
    drawn_problem: tuple[OrderProblem, Costs], random: Random
) -> None:
    problem, _ = drawn_problem
    search = Search(problem, find_windows(problem), lower_bound(problem), random)
    first = search.run([(policy, None) for policy in SEEDS[:3]], lambda count: count < 6)
    assume(first)
    spans = [trial.span for trial in first]
    assert spans == sorted(spans)
    policies = [drawn(random) for _ in range(6)]
    before = search.count
    second = search.run([(policy, None) for policy in policies], lambda count: count < 9, first[0])
    assert search.count - before <= 9
    assert second[0].span <= first[0].span + 1e-9
    assert all(fits(problem, trial.listed.lanes) for trial in second)


def exists(problem: OrderProblem, span: int) -> bool:
    """Whether any order of tasks of whole times, without transfers, has this span.

    All that ranks can do is done, from each instant to the next: start a task, or wait.
    """
    n, m, ranks = problem.parts, problem.microbatches, range(problem.ranks)
    durations = [round(time) for time in problem.durations]
    ends = [round(offset) + span for offset in problem.offsets]
    lanes = [[action * n + k for k in parts for action in range(3)] for parts in problem.hosted]
    idle = ((-1, 0),) * problem.ranks  # what each rank runs, and for how long yet
    states = {((0,) * (3 * n), idle)}
    for now in range(max(ends)):
        begun = states
        for rank in ranks:
            states, begun = begun, set()
            for done, running in states:
                if running[rank][1]:
                    begun.add((done, running))
                    continue
                left = sum(durations[lane] * (m - done[lane]) for lane in lanes[rank])
                if now + left > ends[rank]:
                    continue
                begun.add((done, running))
                held = sum(problem.grows[lane] * done[lane] for lane in lanes[rank])
                for lane in lanes[rank]:
                    action, k = divmod(lane, n)
                    needs = [k - 1] if k else []
                    if action:
                        needs = [lane - n, *([lane + 1] if action == 1 and k + 1 < n else [])]
                    if done[lane] == m or any(done[other] <= done[lane] for other in needs):
                        continue
                    if not action and held + problem.grows[lane] > problem.capacities[rank] + 1e-6:
                        continue
                    runs = (lane, durations[lane])
                    begun.add((done, (*running[:rank], runs, *running[rank + 1 :])))
        states = set()
        for done, running in begun:
            after = list(done)
            for lane, left in running:
                after[lane] += left == 1
            if min(after) == m:
                return True
            still = tuple((lane, left - 1) if left > 1 else (-1, 0) for lane, left in running)
            states.add((tuple(after), still))
    return False


@examples(60, shrinks=True)
@given(st.data(), st.sampled_from([(0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 0)]), st.integers(1, 3))
def test_of_all_orders_of_several_parts_none_is_under_the_bound(
    data: st.DataObject, ranks: tuple[int, ...], m: int
) -> None:
    each = st.tuples(*[st.sampled_from([1.0, 1.0, 2.0])] * len(ranks))
    share = data.draw(st.sampled_from([1.0, 1.0, 0.5]))
    costs = Costs(data.draw(each), data.draw(each), data.draw(each), mw=share)
    problem = OrderProblem.of(Pipeline(ranks, m), costs, data.draw(st.sampled_from([1, 1.5, 2, 3])))
    assume(not problem.lacking())
    assert not exists(problem, ceil(lower_bound(problem) - 1e-6) - 1)


def test_of_several_parts_the_bound_counts_the_memory_of_all() -> None:
    """Without how many W of any part must run before the last F, it would be 22."""
    problem = OrderProblem.of(Pipeline((0, 1, 2, 0, 1, 2), 3), Costs(), 2)
    assert lower_bound(problem) == 23
    assert exists(problem, 23)


def shortest(p: int, m: int, costs: Costs, memory: int) -> float:
    """The makespan of the best order of a line of stages, by trying them all."""
    problem = OrderProblem.of(Pipeline(tuple(range(p)), m), costs, memory)
    tf, tb, tw = (problem.durations[action * p] for action in range(3))
    offsets = problem.offsets
    words: list[list[str]] = []

    def spell(word: str) -> None:
        f, b, w = (word.count(letter) for letter in "FBW")
        if len(word) == 3 * m:
            found.append(word)
            return
        if f < m and f - w < memory:
            spell(word + "F")
        if b < f:
            spell(word + "B")
        if w < b:
            spell(word + "W")

    for _ in range(p):
        found: list[str] = []
        spell("")
        words.append(found)

    def span(chosen: tuple[str, ...]) -> float:
        at, clock = [0] * p, list(offsets)
        done: dict[tuple[str, int, int], float] = {}
        moved = True
        while moved:
            moved = False
            for s in range(p):
                while at[s] < 3 * m:
                    letter = chosen[s][at[s]]
                    i = chosen[s][: at[s]].count(letter)
                    needs = ("F", s - 1, i) if letter == "F" else ("B", s + 1, i)
                    needed = letter != "W" and 0 <= needs[1] < p
                    if needed and needs not in done:
                        break
                    ready = done[needs] + float(costs.between(0)) if needed else 0.0
                    start = max(clock[s], ready)
                    clock[s] = done[letter, s, i] = start + {"F": tf, "B": tb, "W": tw}[letter]
                    at[s] += 1
                    moved = True
        if min(at) < 3 * m:
            return float("inf")
        return max(end - begin for end, begin in zip(clock, offsets, strict=True))

    return min(map(span, product(*words)))


@pytest.mark.parametrize(
    ("p", "m", "memory"), [(1, 3, 1), (1, 3, 3), (2, 2, 1), (2, 2, 2), (2, 3, 2)]
)
def test_small_pipelines_are_optimal(p: int, m: int, memory: int) -> None:
    for tf, tb, tw, tcomm in ((1, 1, 1, 0), (2, 1, 1, 0), (1, 2, 1, 1), (1, 2, 2, 0), (2, 1, 2, 1)):
        costs = Costs(tf, tb, tw, tcomm)
        found = best(Pipeline(tuple(range(p)), m), memory, costs)
        optimum = shortest(p, m, costs, memory)
        assert found.bound <= optimum + 1e-6
        assert found.makespan == pytest.approx(optimum)


@pytest.mark.parametrize("memory", [1.0, 1.5, 2.0])
def test_stages_recompute_where_memory_is_short(memory: float) -> None:
    """Both ends of what may be chosen are no better, and the memory is kept to."""
    pipeline, costs = Pipeline((0, 1, 2, 3), 12), Costs(1.0, 1.1, 0.8, 0.05, mr=0.05)
    chosen = best(pipeline, memory, costs, remat=True)
    none = best(pipeline, memory, costs)
    assert chosen.makespan <= none.makespan
    if memory > 1:
        every = best(pipeline, memory, replace(costs, remat=(0, 1, 2, 3)))
        assert chosen.makespan <= every.makespan
        assert chosen.makespan < 0.9 * none.makespan
        assert 0 < len(chosen.remat) < 4
    paid = replace(costs, remat=chosen.remat)
    timeline = play(chosen.order, pipeline.stage_ranks, 12, paid)
    assert timeline.makespan == pytest.approx(chosen.makespan)
    assert max(timeline.held(rank, paid) for rank in range(4)) <= memory + 1e-6
    assert chosen.makespan >= chosen.bound - 1e-6


def test_no_stage_recomputes_where_memory_is_enough() -> None:
    found = best(Pipeline((0, 1, 2), 9), 3, Costs(mr=0.1), remat=True)
    assert found.remat == ()
    assert "recompute" not in str(found)


def test_the_rank_that_lacks_memory_recomputes() -> None:
    pipeline = Pipeline((0, 1, 2), 9)
    costs = Costs(1.0, 1.0, 0.7, activation_bytes=1.0, mr=0.1)
    (found, *_) = schedules.found_orders(
        schedules.auto(costs=costs, max_bytes=(3.0, 1.5, 3.0), remat=True), pipeline
    )
    assert found.remat == (1,)
    assert str(found).endswith("; stage 1 recomputes")


def test_where_one_microbatch_does_not_fit_the_error_names_what_would() -> None:
    pipeline, costs = Pipeline((0, 1, 0, 1), 4), Costs(activation_bytes=2.0, mr=0.5)
    with pytest.raises(ValueError, match=r"takes 4; auto\(remat=True\)"):
        schedules.auto(costs=costs, max_bytes=3.0)(pipeline)
    found = schedules.found_orders(schedules.auto(costs=costs, max_bytes=3.0, remat=True), pipeline)
    assert len(found[0].remat) > 0
    with pytest.raises(ValueError, match=r"takes 3; even as stages recompute"):
        schedules.auto(costs=costs, max_bytes=2.5, remat=True)(pipeline)


def test_remat_needs_to_know_what_a_stage_holds() -> None:
    with pytest.raises(ValueError, match="remat needs costs with mr"):
        schedules.auto(2, remat=True)(Pipeline((0, 1), 4))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_forwards_that_fill_the_memory_of_a_v_are_found(seed: int) -> None:
    """A climb from policies by tails, and with backwards first, ends at 3.4 to 4 % here."""
    line = tuple(range(26))
    ranks = line + line[::-1]
    costs = Costs(1.4564, 0.792, 0.6458, 0.0283).shared(ranks)
    found = best(Pipeline(ranks, 56), 52, costs, seed=seed)
    assert found.gap <= 0.03


@cache
def recorded() -> Any:
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def test_recorded_optima_are_found() -> None:
    """Optima of an exact solver, of all small pipelines: at least 95 % of them are met."""
    rows = [row for row in recorded()["optima"] if row["proven"]]
    sample = Random(0).sample(rows, min(len(rows), 40 * scale() ** 3))
    met = 0
    for row in sample:
        costs = Costs(row["tf"], row["tb"], row["tw"], row["tcomm"])
        pipeline = Pipeline(tuple(range(row["ranks"])), row["microbatches"])
        found = best(pipeline, row["memory"], costs)
        assert found.bound - 1e-6 <= row["optimum"] <= found.makespan + 1e-6
        met += found.makespan <= row["optimum"] + 1e-6
    assert met >= 0.95 * len(sample)


def test_recorded_settings_are_close_to_the_bound() -> None:
    """With twice the memory of 1F1B: at most 1 % above the bound in nine of ten, never over 3 %."""
    rows = recorded()["random"]
    assert len(rows) == 300
    known = [row for row in rows if row["known_makespan"] is not None]
    assert all(row["makespan"] <= row["known_makespan"] + 1e-6 for row in known)
    assert all(row["peak"] <= row["setting"]["memory"] + 1e-6 for row in rows)
    twice = [row for row in rows if row["setting"]["memory"] == 2 * row["setting"]["ranks"]]
    gaps = sorted(row["makespan"] / row["bound"] - 1 for row in twice)
    assert gaps[-1] <= 0.03
    assert gaps[int(0.9 * len(gaps))] <= 0.01


def random_costs(random: Random) -> Costs:
    tf, tb, tw = (random.uniform(0.5, 1.5) for _ in range(3))
    return Costs(tf, tb, tw, random.uniform(0, 0.1) * tf)


def test_random_settings_are_close_to_the_bound() -> None:
    """With room for twice the activations: no order is 3 % longer than the bound, few are 1 %."""
    random = Random(1)
    gaps = []
    for _ in range(8 * scale()):
        p = random.randint(2, 7)
        line = tuple(range(p))
        ranks = random.choice([line, line + line[::-1]])
        costs = random_costs(random).shared(ranks)
        pipeline = Pipeline(ranks, random.randint(2 * p, 5 * p))
        found = best(pipeline, 2 * p, costs)
        for name in ("1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"):
            try:
                order = schedules.by_name(name)(pipeline)
            except ValueError:
                continue
            other = play(order, ranks, pipeline.microbatches, costs)
            if max(other.peak(rank) for rank in line) <= 2 * p + 1e-6:
                assert found.makespan <= other.makespan + 1e-6
        assert found.peak <= 1 + 1e-6
        gaps.append(found.gap)
    assert max(gaps) <= 0.03
    assert sum(gap <= 0.01 for gap in gaps) >= 0.9 * len(gaps) - 1


def test_in_the_memory_of_1f1b_nothing_is_longer_than_by_the_heuristic() -> None:
    """Recorded makespans of the best of the zero-bubble heuristic's options, as it was."""
    rows = [
        row
        for row in recorded()["random"]
        if row["before"] and row["setting"]["memory"] == row["setting"]["ranks"]
    ]
    rows = [row for row in rows if row["makespan"] > row["bound"] * (1 + 1e-6)]
    rows.sort(key=lambda row: row["search_s"])
    for row in rows[: 4 * scale() ** 2]:
        setting = row["setting"]
        line = tuple(range(setting["ranks"]))
        rest = line[::-1] if setting["layout"] == "vee" else line
        ranks = line + rest * (setting["chunks"] - 1)
        costs = Costs(*(setting[name] for name in ("tf", "tb", "tw", "tcomm"))).shared(ranks)
        found = best(Pipeline(ranks, setting["microbatches"]), setting["memory"], costs)
        assert found.makespan <= row["before"] * (1 + 1e-6), row


@pytest.mark.parametrize("ranks", [(0, 1, 2), (0, 1, 2, 2, 1, 0)])
def test_many_microbatches_lose_nothing_more(ranks: tuple[int, ...]) -> None:
    costs = Costs(1.1, 0.9, 0.7, 0.05).shared(ranks)
    few, many = (best(Pipeline(ranks, m), 5, costs) for m in (40, 240))
    work = 200 * (1.1 + 0.9 + 0.7)
    assert many.makespan - few.makespan <= work * 1.005
    assert many.gap <= 0.005


def test_a_stretched_order_keeps_the_beginning_and_the_end() -> None:
    problem = OrderProblem.of(Pipeline((0, 1), 100), Costs(), 4)
    assert fewer_microbatches(problem) == 3 * 2 + 12
    small = problem.with_microbatches(fewer_microbatches(problem))
    listed = list_schedule(small, Rule([[0.0] * 18] * 6, (0.0, 0.0, 0.0)))
    assert listed is not None
    urgency = stretched(small, listed, 0.5, 82)
    assert [len(lane) for lane in urgency] == [100] * 6
    for lane in urgency:
        assert lane == sorted(lane, reverse=True)
    assert urgency[0][0] == 0.0


def test_a_seed_gives_the_same_order_always() -> None:
    pipeline, costs = Pipeline((0, 1, 2, 2, 1, 0), 9), Costs(0.6, 0.8, 0.35, 0.05)
    first = best(pipeline, 4, costs, seed=3)
    search._find.cache_clear()
    from_scratch = best(Pipeline((0, 1, 2, 2, 1, 0), 9), 4, Costs(0.6, 0.8, 0.35, 0.05), seed=3)
    assert first.order == from_scratch.order


def test_memory_may_be_in_bytes_of_each_stage() -> None:
    pipeline = Pipeline((0, 1, 2), 8)
    costs = Costs(1.0, 1.0, 0.6, activation_bytes=(3e9, 1e9, 2e9))
    found = schedules.found_orders(schedules.auto(costs=costs, max_bytes=6e9), pipeline)[0]
    timeline = play(found.order, pipeline.stage_ranks, 8, costs)
    held = [timeline.held(rank, costs) for rank in range(3)]
    assert max(held) <= 6e9
    assert timeline.peak(0) <= 2  # of the largest activations
    each = schedules.auto(costs=costs, max_bytes=(6e9, 3e9, 2e9))
    order = schedules.found_orders(each, pipeline)[0].order
    timeline = play(order, pipeline.stage_ranks, 8, costs)
    assert all(timeline.held(rank, costs) <= most for rank, most in enumerate((6e9, 3e9, 2e9)))
    assert timeline.makespan > found.makespan  # on the last rank there is room for one alone


def test_without_a_split_there_is_no_w() -> None:
    pipeline, costs = Pipeline((0, 1, 2, 0, 1, 2), 7), Costs(0.5, 0.7, 0.4)
    schedule = schedules.auto(3, costs, splits=False)
    assert not schedule.splits
    order = schedule(pipeline)
    assert not any(str(task)[1] == "W" for tasks in order.values() for task in tasks)
    whole = schedules.found_orders(schedule, pipeline)[0]
    split = schedules.found_orders(schedules.auto(3, costs), pipeline)[0]
    assert split.makespan <= whole.makespan


def test_a_budget_of_time_is_kept() -> None:
    pipeline, costs = Pipeline((0, 1, 2, 3) * 2, 9), Costs(0.6, 0.85, 0.35, 0.06)
    found = best(pipeline, 4, costs, seconds=0.05)
    assert found.makespan >= found.bound - 1e-9


def test_each_climb_has_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on whenever it is read; the last climb has all that is left."""
    ticks = count()
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)))
    monkeypatch.setattr(search, "time", clock)
    trials: list[int] = []
    run = Search.run

    def counted(self: Search, *arguments: Any) -> Any:
        before = self.count
        found = run(self, *arguments)
        trials.append(self.count - before)
        return found

    monkeypatch.setattr(Search, "run", counted)
    costs = Costs(0.6, 0.85, 0.35, 0.06)
    best(Pipeline((0, 1, 2, 3) * 2, 9), 4, costs, seconds=400.0)
    first, second = trials
    assert 150 <= first <= 200
    assert 150 <= second <= 200
    assert next(ticks) >= 400


def test_with_what_w_keeps_as_published_the_bound_is_reached() -> None:
    """ZB-2p of arXiv 2401.10241, 1.5B on 8 ranks. Were all kept until W, it could not be."""
    pipeline = Pipeline(tuple(range(8)), 24)
    published = Costs(18.522, 18.086, 9.337, 0.601, mw=0.43)
    found = best(pipeline, 16, published)
    busy = 24 * (18.522 + 18.086 + 9.337)
    assert 1 - busy / found.makespan == pytest.approx(0.0433, abs=5e-5)
    assert found.gap < 1e-6
    kept = best(pipeline, 16, Costs(18.522, 18.086, 9.337, 0.601))
    assert 1 - busy / kept.bound > 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_bytes": 1e9}, "max_bytes needs Costs"),
        ({"max_bytes": (1.0, 2.0, 3.0), "costs": Costs(activation_bytes=1.0)}, "given for 3 ranks"),
        ({"max_bytes": 1.0, "costs": Costs(activation_bytes=2.0)}, "rank 0 may hold 1, but one"),
        (
            {"max_bytes": 9.0, "max_activations": 2, "costs": Costs(activation_bytes=2.0)},
            "not both",
        ),
        ({"measure": True}, "measure is for compile"),
    ],
)
def test_memory_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedules.auto(**options)(Pipeline((0, 1), 2))


def test_costs_are_given_or_measured() -> None:
    with pytest.raises(ValueError, match="not both"):
        schedules.auto(costs=Costs(), measure=True)
    with pytest.raises(ValueError, match="schedule 'gpipe' does not search"):
        schedules.found_orders(schedules.gpipe(), Pipeline((0,), 1))
