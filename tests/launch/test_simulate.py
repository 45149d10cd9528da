"""Compiled steps on paper, recorded while they run, and measured."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.ir.ops import Call
from cg.launch.world.world import use_world
from cg.passes.schedules import Pipeline
from cg.passes.simulate.schedule_simulator import simulate

M, WIDTH = 4, 4
X = torch.ones(M, WIDTH)


@cg.actor
class ScalingStage(nn.Module):
    """A factor for each feature, and an opaque check."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight)

    def loss(self, x: Tensor) -> Tensor:
        return (x**2).mean()

    @cg.opaque
    def check(self, text: Any) -> Any:
        if text == "bad":
            raise ValueError("a bad one")
        return text


def step_of(stages: list[Any], m: int = M) -> cg.Step:
    @cg.trace
    def step(x: Tensor) -> Tensor:
        losses = []
        for part in cg.microbatches(x, m):
            for stage in stages:
                part = stage.forward(part)
            losses.append(stages[-1].loss(part))
        loss = cg.mean(losses)
        cg.backward(loss)
        return loss

    return step


@pytest.fixture
def stages() -> Iterator[list[Any]]:
    with use_world(VirtualWorld(2)):
        yield [ScalingStage.on(rank)() for rank in range(2)]


@pytest.fixture
def compiled(stages: list[Any]) -> cg.Compiled:
    return step_of(stages).lower(X).compile()


@pytest.fixture
def messages() -> Iterator[cg.Compiled]:
    """Driven by rank 0."""
    with use_world(VirtualWorld(2)):
        actor = ScalingStage.on(1)()

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def ask(text: Any) -> Any:
            return actor.check(text)

        yield ask.lower(cg.object).compile(max_inflight=2)


def test_without_costs_each_task_takes_a_millisecond(compiled: cg.Compiled) -> None:
    found = compiled.simulate()
    order = cg.schedules.one_f_one_b()(Pipeline((0, 1), M))
    paper = simulate(order, (0, 1), M)
    assert found.makespan == pytest.approx(paper.makespan)
    assert found.bubble_ratio == pytest.approx(paper.bubble_ratio)
    assert found.exposed_ratio == 0.0


def test_peaks_are_those_of_the_buffer_plan(compiled: cg.Compiled) -> None:
    peaks = [rank.peak_bytes for rank in compiled.simulate().ranks]
    assert peaks == [plan.peak for plan in compiled.memory_analysis()]
    assert all(peaks)


def test_it_prints_a_table(compiled: cg.Compiled) -> None:
    lines = str(compiled.simulate(cg.Costs(2.0, 1.0, 1.0, tcomm=0.5))).splitlines()
    assert lines[0] == "makespan 22.000 ms, bubble 27.27%, exposed communication 4.55%"
    heads = ("rank", "start ms", "end ms", "busy ms", "blocked ms", "exposed ms", "peak bytes")
    assert lines[1].split() == " ".join(heads).split()
    assert [line.split()[0] for line in lines[2:]] == ["0", "1"]


def test_costs_come_from_files(compiled: cg.Compiled, tmp_path: Path) -> None:
    costs = cg.Costs(2.0, 1.0, 1.0, overhead=0.125, post=0.25, link=cg.Link(0.5, 10.0))
    costs.save(tmp_path / "costs.json")
    expected = str(compiled.simulate(costs))
    assert str(compiled.simulate(tmp_path / "costs.json")) == expected
    assert str(compiled.simulate(str(tmp_path / "costs.json"))) == expected


def test_other_costs_are_refused(compiled: cg.Compiled) -> None:
    with pytest.raises(TypeError, match=r"costs are dict; simulate\(\) takes cg\.Costs \(what cg"):
        compiled.simulate({"tf": 1.0})  # type: ignore[arg-type]


def test_a_recording_has_every_call_in_its_order(compiled: cg.Compiled) -> None:
    first, second = compiled.record(X, executions=2)
    for found in (first, second):
        for program, rank in zip(compiled.module.programs, found.ranks, strict=True):
            spans = [span for span in found.spans if span.rank == rank.rank]
            assert [span.op for span in spans] == [op for op in program.ops if isinstance(op, Call)]
            times = [time for span in spans for time in (span.start, span.end)]
            assert times == sorted(times)
            assert rank.start >= 0
            assert rank.busy + rank.blocked == pytest.approx(rank.span)
    assert "exposed communication" not in str(first)
    assert str(first).splitlines()[2].split()[5] == "-"


def test_recording_runs_the_step(compiled: cg.Compiled, stages: list[Any]) -> None:
    compiled(X)
    wanted = [stage.local.weight.grad.clone() for stage in stages]
    for stage in stages:
        stage.local.weight.grad = None
    compiled.record(X)
    assert all(
        torch.equal(stage.local.weight.grad, grad)
        for stage, grad in zip(stages, wanted, strict=True)
    )
    compiled(X)


def test_what_is_measured_explains_the_step(
    compiled: cg.Compiled, stages: list[Any], tmp_path: Path
) -> None:
    costs = cg.measure(compiled, X, executions=2)
    module = compiled.module
    calls = [op for program in module.programs for op in program.ops if isinstance(op, Call)]
    assert set(costs.functions) == {call.fn.name for call in calls}
    assert set(costs.channels) == set(module.channels)
    assert isinstance(costs.tf, tuple)
    assert isinstance(costs.tb, tuple)
    assert costs.tw == (0.0, 0.0)  # 1F1B has whole backwards
    assert all(time > 0 for time in (*costs.tf, *costs.tb))
    assert costs.tf[0] == pytest.approx(costs.functions[f"{stages[0].name}.forward.vjp.forward"])
    found = compiled.simulate(costs)
    work = [
        sum(costs.functions[c.fn.name] for c in calls if c in one.ops) for one in module.programs
    ]
    assert [rank.busy for rank in found.ranks] == pytest.approx(work)
    costs.save(tmp_path / "costs.json")
    assert cg.Costs.load(tmp_path / "costs.json") == costs


def test_split_backwards_are_measured_by_halves(stages: list[Any]) -> None:
    compiled = step_of(stages).lower(X).compile(schedule=cg.schedules.zb_h1())
    costs = cg.measure(compiled, X, executions=1)
    assert isinstance(costs.tb, tuple)
    assert isinstance(costs.tw, tuple)
    # Nobody needs the gradient of the first stage's input: all of its backward is W.
    assert costs.tb[0] == 0.0
    assert min(costs.tb[1], *costs.tw) > 0
    searched = step_of(stages).lower(X).compile(schedule=cg.schedules.auto(costs=costs))
    assert searched.simulate(costs).makespan <= compiled.simulate(costs).makespan + 1e-6


def test_a_search_with_costs_settles_on_the_fastest_programs() -> None:
    """Long transfers wait for each other, which the order alone does not show."""
    costs = cg.Costs(10.0, (0.0, 10.0, 10.0, 10.0), (20.0, 10.0, 10.0, 10.0), 6.0)
    schedule = cg.schedules.auto(4, costs)
    m, x = 8, torch.ones(8, WIDTH)
    with use_world(VirtualWorld(4)):
        lowered = step_of([ScalingStage.on(rank)() for rank in range(4)], m).lower(x)
        found = [
            lowered.compile(schedule=one).simulate(costs).makespan
            for one in cg.schedules.candidates(schedule)
        ]
        settled = lowered.compile(schedule=schedule).simulate(costs).makespan
    assert settled == min(found) < found[0]
    orders = [one(Pipeline(tuple(range(4)), m)) for one in cg.schedules.candidates(schedule)]
    times = [simulate(order, range(4), m, costs).makespan for order in orders]
    assert times == sorted(times)
    assert all(one != other for one, other in pairwise(orders))


def test_what_does_not_search_with_costs_has_no_candidates() -> None:
    settled = cg.schedules.candidates(cg.schedules.auto(3, cg.Costs()))[1]
    for schedule in (cg.schedules.auto(3), cg.schedules.zb_h1(), settled):
        assert cg.schedules.candidates(schedule) == (schedule,)


def test_graphs_are_measured_too(messages: cg.Compiled) -> None:
    costs = cg.measure(messages, "hello", executions=1)
    assert list(costs.functions) == list(messages.module.functions)
    assert messages.execute("bye").result() == "bye"


def test_failures_are_those_of_the_step(messages: cg.Compiled) -> None:
    with pytest.raises(cg.RemoteError, match="a bad one") as caught:
        messages.record("bad")
    actor = next(iter(messages.module.functions.values())).actor
    assert (caught.value.rank, caught.value.actor, caught.value.method) == (1, actor, "check")
    assert messages.execute("good").result() == "good"


def test_arguments_must_fit(compiled: cg.Compiled) -> None:
    with pytest.raises(cg.InputError, match="argument x of step"):
        compiled.record(torch.ones(3))
    with pytest.raises(ValueError, match="executions=0: there must be at least 1"):
        cg.measure(compiled, X, executions=0)


def test_a_step_may_have_a_parameter_executions(stages: list[Any]) -> None:
    @cg.trace
    def step(self: torch.Tensor, *, executions: torch.Tensor) -> torch.Tensor:
        return stages[0].forward(self * executions)

    @cg.trace
    def more(compiled: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return stages[0].forward(compiled * named["executions"])

    for one, first in ((step, "self"), (more, "compiled")):
        given = {first: X, "executions": torch.ones(())}
        compiled = one.lower(**given).compile()
        for ask in (compiled.record, compiled.measure):
            with pytest.raises(TypeError, match=rf"step {one.__name__} has a parameter exec") as e:
                ask(**given)
            assert f"write compiled.repeated(n).{ask.__name__}(...)" in str(e.value)
        assert len(compiled.repeated(2).record(**given)) == 2
        assert compiled.repeated(1).measure(**given).functions
    # Who says nothing of how often has the arguments to himself.
    compiled = step_of(stages).lower(X).compile()
    for wrong, error in ((0, ValueError), (2.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match=f"executions={wrong}: "):
            compiled.repeated(wrong)  # type: ignore[arg-type]
        with pytest.raises(error, match=f"executions={wrong}: "):
            compiled.record(X, executions=wrong)  # type: ignore[arg-type]


def test_a_closed_step_is_refused(compiled: cg.Compiled) -> None:
    compiled.close()
    with pytest.raises(RuntimeError, match="'step' has been closed: compile it again"):
        compiled.record(X)
    assert compiled.simulate().makespan > 0
