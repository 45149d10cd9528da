"""What the forwards of random pipelines save, against the best choice that all stages share."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cg.ir.attributes import Action
from cg.ir.ops import Call
from cg.ir.ops.clone import clone
from cg.ir.ops.module import Module, Vjp
from cg.ir.pipeline.costs import Costs, Link
from cg.ir.pipeline.tradeoff import SavingPoint, Tradeoff
from cg.ir.types import DType, TensorType
from cg.launch.api.fit_trace import ScheduleChoice
from cg.launch.api.select_schedule import narrower
from cg.passes import schedules
from cg.passes.manager.manager import run_on_copy
from cg.passes.manager.pipelines import default_pipeline
from cg.passes.memory.choice_times import choice_time, section_times
from cg.passes.memory.fit import Fit, MemoryLimitError, fit
from cg.passes.memory.offload import ALL, HIDDEN, Offload
from cg.passes.memory.saving_levels import HostMemory, saving_levels
from cg.passes.memory.whole_backwards import with_whole_backwards
from cg.passes.placement.fabrics import Fabrics
from cg.passes.schedules import Schedule
from cg.passes.simulate.memory_plan import memory_plan
from cg.passes.simulate.program_simulator import simulate_programs

from ..sampling import examples, scale

pytestmark = pytest.mark.timeout(1800)

Make = Callable[..., Module]

LAYERS = 4
"""Layers of a stage; each saves its input, or all of its values."""


@dataclass
class Pipe:
    """A pipeline whose stages have layers of random size, and its step.

    Attributes:
        link: to the host of each rank's device; None: ranks have no devices.
    """

    module: Module
    schedule: schedules.Schedule
    tradeoffs: Mapping[str, Tradeoff]
    link: Link | None = None

    @property
    def costs(self) -> Costs:
        """The times of functions that compute nothing again, and the link."""
        functions = {}
        for name, tradeoff in self.tradeoffs.items():
            vjp = self.module.vjps[name]
            functions[vjp.forward] = float(tradeoff.work)
            functions[vjp.backward] = float(2 * tradeoff.work)
        return Costs(functions=functions, host=self.link or Link(), speed=4e11)

    @property
    def hosts(self) -> HostMemory:
        return HostMemory(frozenset(range(self.module.world)), self.costs)

    def chosen_time(self, limits: Mapping[str, int], amounts: Mapping[int, int]) -> float:
        """On paper, in milliseconds, as the choice counts it."""
        module = self.compiled(limits, amounts=amounts)
        return choice_time(module, self.module.vjps, self.tradeoffs, limits, self.costs)

    def compiled(
        self,
        limits: Mapping[str, int],
        whole: frozenset[int] = frozenset(),
        amounts: Mapping[int, int] = MappingProxyType({}),
    ) -> Module:
        module = clone(self.module)
        for name, tradeoff in self.tradeoffs.items():
            size = limits.get(name, tradeoff.most)
            saved = TensorType(DType.F32, (tradeoff.within(size).saved // 4,))
            vjp = module.vjps[name]
            forward, backward = module.functions[vjp.forward], module.functions[vjp.backward]
            outputs = (forward.outputs[0], saved)
            module.functions[vjp.forward] = replace(forward, outputs=outputs)
            for section in {vjp.backward, vjp.weight}:
                inputs = (saved, backward.inputs[1])
                function = module.functions[str(section)]
                module.functions[function.name] = replace(function, inputs=inputs)
        schedule, ranks = with_whole_backwards(self.schedule, whole), range(module.world)
        if self.link is None:
            assert not any(amounts.values()), "no rank has a device"
            return run_on_copy(default_pipeline(schedule), module)[0]
        listed = "+".join(str(amounts.get(rank, 0)) for rank in ranks)
        offload = Offload(amounts=listed if any(amounts.values()) else "", costs=self.costs)
        fabrics = Fabrics("+".join("fake" for _ in ranks))
        pipeline = default_pipeline(schedule, fabrics=fabrics, offload=offload)
        return run_on_copy(pipeline, module)[0]

    def time(self, module: Module, limits: Mapping[str, int]) -> float:
        functions = {}
        for name, tradeoff in self.tradeoffs.items():
            again = tradeoff.within(limits.get(name, tradeoff.most)).again
            vjp = self.module.vjps[name]
            functions[vjp.forward] = float(tradeoff.work)
            functions[vjp.backward] = float(2 * tradeoff.work + again)
        return simulate_programs(module, Costs(functions=functions)).makespan

    def peaks(self, module: Module) -> list[int]:
        return [memory_plan(module, rank).peak for rank in range(module.world)]


def draw_pipe(seed: int, make: Make) -> Pipe:
    draw = random.Random(seed)
    ranks, name = draw.randint(2, 4), draw.choice(["1f1b", "interleaved"])
    microbatches = ranks * draw.randint(1, 2)
    homes = [stage % ranks for stage in range(ranks * (2 if name == "interleaved" else 1))]
    tradeoffs = {}
    for stage in range(len(homes)):
        layer, work = 64 * draw.randint(2, 8), draw.randint(5, 15)
        points = tuple(
            SavingPoint(4 * (layer * (LAYERS - k) + 16 * k + 16), k * work)
            for k in range(LAYERS + 1)
        )
        tradeoffs[f"stage{stage}.forward.vjp"] = Tradeoff(points, work * LAYERS)
    return Pipe(make(ranks, microbatches, homes), schedules.by_name(name), tradeoffs)


@examples(100)
@given(seed=st.integers(0, 10**9), share=st.floats(0.2, 0.95))
def test_no_choice_that_stages_share_is_faster(
    seed: int, share: float, pipeline_module: Make
) -> None:
    pipe = draw_pipe(seed, pipeline_module)
    uniform = []
    for count in range(LAYERS + 1):
        limits = {name: t.points[count].saved for name, t in pipe.tradeoffs.items()}
        module = pipe.compiled(limits)
        uniform.append((max(pipe.peaks(module)), pipe.time(module, limits)))
    most, least = uniform[0][0], uniform[-1][0]
    memory = int(least + share * (most - least))
    ranks = [memory] * pipe.module.world
    chosen = fit(pipe.module.vjps, pipe.tradeoffs, ranks, pipe.compiled, False)
    module = pipe.compiled(chosen.limits, chosen.whole)
    assert max(pipe.peaks(module)) <= memory
    best = min(time for peak, time in uniform if peak <= memory)
    assert pipe.time(module, chosen.limits) <= best * (1 + 1e-9)


@examples(50 if scale() == 1 else 100)
@given(
    seed=st.integers(0, 10**9),
    share=st.floats(0.1, 0.95),
    bandwidth=st.floats(-9, -4).map(lambda power: 10**power),
)
def test_no_choice_that_only_moves_or_only_computes_again_is_faster(
    seed: int, share: float, bandwidth: float, pipeline_module: Make
) -> None:
    """From links that carry a byte in a step to those that carry everything."""
    pipe = replace(draw_pipe(seed, pipeline_module), link=Link(0.0, bandwidth))
    least = {name: tradeoff.least for name, tradeoff in pipe.tradeoffs.items()}
    most, little = (max(pipe.peaks(pipe.compiled(limits))) for limits in ({}, least))
    memory = [int(little + share * (most - little))] * pipe.module.world
    given = pipe.module.vjps, pipe.tradeoffs, memory, pipe.compiled, False
    chosen = fit(*given, pipe.hosts)
    assert max(pipe.peaks(pipe.compiled(chosen.limits, amounts=chosen.amounts))) <= memory[0]
    again = fit(*given, pipe.hosts.without_moves())
    assert not any(again.amounts.values())
    times = [pipe.chosen_time(again.limits, {})]
    for amount in range(ALL + 1):
        amounts = dict.fromkeys(range(pipe.module.world), amount)
        if max(pipe.peaks(pipe.compiled({}, amounts=amounts))) <= memory[0]:
            times.append(pipe.chosen_time({}, amounts))
    assert pipe.chosen_time(chosen.limits, chosen.amounts) <= min(times) * (1 + 1e-9)


@pytest.mark.parametrize(("bandwidth", "moves"), [(1e-12, False), (1e6, True)])
def test_the_link_of_a_step_says_whether_tensors_move(
    pipeline_module: Make, bandwidth: float, moves: bool
) -> None:
    """Three stages of one rank, and forwards whose work is dear."""
    module = pipeline_module(1, 1, [0, 0, 0])
    tradeoff = Tradeoff((SavingPoint(4096, 0), SavingPoint(64, 50)), 100)
    names = [f"stage{stage}.forward.vjp" for stage in range(3)]
    tradeoffs = dict.fromkeys(names, tradeoff)
    pipe = Pipe(module, schedules.by_name("1f1b"), tradeoffs, Link(0.0, bandwidth))
    peak = max(pipe.peaks(pipe.compiled({})))
    chosen = fit(module.vjps, pipe.tradeoffs, [int(0.9 * peak)], pipe.compiled, False, pipe.hosts)
    compiled = pipe.compiled(chosen.limits, amounts=chosen.amounts)
    assert bool(memory_plan(compiled, 0).moved) == moves
    assert bool(chosen.limits) != moves


def test_copies_share_the_link(pipeline_module: Make) -> None:
    """As many tensors move as the link carries in the whole step, and not all that could alone."""
    module = pipeline_module(1, 1, list(range(1)) * 8)
    tradeoff = Tradeoff((SavingPoint(4000, 0), SavingPoint(64, 50)), 100)
    names = [f"stage{stage}.forward.vjp" for stage in range(8)]
    moved = {}
    for milliseconds in (0.1, 90.0, 250.0, 1e9):
        pipe = Pipe(
            module,
            schedules.by_name("1f1b"),
            dict.fromkeys(names, tradeoff),
            Link(0.0, 4000 / (milliseconds * 1e6)),
        )
        plan = memory_plan(pipe.compiled({}, amounts={0: HIDDEN}), 0)
        moved[milliseconds] = plan.moved // 4000
        plain = simulate_programs(pipe.compiled({}), pipe.costs).makespan
        there = simulate_programs(pipe.compiled({}, amounts={0: HIDDEN}), pipe.costs).makespan
        assert there == pytest.approx(plain, rel=1e-6)
    assert moved[0.1] >= moved[90.0] > moved[250.0] > moved[1e9] == 0


def test_levels_of_ranks_without_a_shared_forward_are_apart(pipeline_module: Make) -> None:
    pipe = draw_pipe(0, pipeline_module)
    groups = saving_levels(pipe.compiled({}), pipe.module.vjps, pipe.tradeoffs)
    assert [group.ranks for group in groups] == [(r,) for r in range(pipe.module.world)]
    for group in groups:
        assert group.limits[0] == {}
        assert all(
            size == pipe.tradeoffs[name].least for name, size in group.limits[group.last].items()
        )


def test_measured_forwards_give_the_price_of_their_work(pipeline_module: Make) -> None:
    """Of two stages of one rank, the one whose forward is slower keeps what it saves longer."""
    module = pipeline_module(1, 2, [0, 0])
    vjps = [f"stage{stage}.forward.vjp" for stage in range(2)]
    tradeoff = Tradeoff((SavingPoint(100, 0), SavingPoint(10, 50)), 100)
    pipe = Pipe(module, schedules.by_name("1f1b"), dict.fromkeys(vjps, tradeoff))
    for slow, fast in (vjps, vjps[::-1]):
        times = {module.vjps[slow].forward: 2.0, module.vjps[fast].forward: 1.0}
        hosts = HostMemory(costs=Costs(functions=times))
        (group,) = saving_levels(pipe.compiled({}), module.vjps, pipe.tradeoffs, hosts)
        assert group.limits[1] == {fast: 10}
        assert group.limits[2] == {fast: 10, slow: 10}


def test_a_measured_forward_says_what_is_cheaper_than_the_link(pipeline_module: Make) -> None:
    module = pipeline_module(1, 2, [0])
    name = "stage0.forward.vjp"
    pipe = Pipe(
        module,
        schedules.by_name("1f1b"),
        {name: Tradeoff((SavingPoint(10**6, 0), SavingPoint(10, 50)), 100)},
    )
    for time, is_first in ((1e-3, True), (1e3, False)):
        costs = Costs(functions={module.vjps[name].forward: time})
        hosts = HostMemory(frozenset({0}), costs)
        (group,) = saving_levels(pipe.compiled({}), module.vjps, pipe.tradeoffs, hosts)
        late = group.amounts.index(HIDDEN + 1)
        assert (group.limits[late] == {name: 10}) == is_first


def test_what_cannot_fit_is_refused(pipeline_module: Make) -> None:
    pipe = draw_pipe(1, pipeline_module)
    with pytest.raises(MemoryLimitError, match="and the least that its program was found to hold"):
        fit(pipe.module.vjps, pipe.tradeoffs, [100] * pipe.module.world, pipe.compiled, False)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v"])
def test_backwards_may_stay_whole_on_some_ranks(name: str, pipeline_module: Make) -> None:
    homes = [0, 1, 1, 0] if name == "zb-v" else [0, 1]
    schedule = with_whole_backwards(schedules.by_name(name), {1})
    module = run_on_copy(default_pipeline(schedule), pipeline_module(2, 4, homes))[0]
    times = simulate_programs(module, Costs(tf=1.0, tb=2.0, tw=3.0))
    for program, time in zip(module.programs, times.ranks, strict=True):
        assert time.busy == 4 * homes.count(program.rank) * 6.0
        tasks = {op.task for op in program.ops if isinstance(op, Call) and op.task is not None}
        numbers = Counter(task.action for task in tasks)
        stages = homes.count(program.rank)
        if program.rank == 1:
            assert (numbers[Action.BACKWARD], numbers[Action.WEIGHT]) == (4 * stages, 0)
        else:
            assert numbers[Action.WEIGHT] == 4 * stages


@examples(24)
@given(seed=st.integers(0, 10**9), share=st.floats(0.2, 0.95))
def test_no_search_that_is_tried_is_faster(seed: int, share: float, pipeline_module: Make) -> None:
    pipe = draw_pipe(seed, pipeline_module)
    searches = narrower(schedules.auto(), pipe.module.world)
    least = {name: tradeoff.least for name, tradeoff in pipe.tradeoffs.items()}
    most, little = (max(pipe.peaks(pipe.compiled(limits))) for limits in ({}, least))
    memory = [int(little + share * (most - little))] * pipe.module.world

    def compiled(schedule: Schedule, *choice: Any) -> Module:
        return replace(pipe, schedule=schedule).compiled(*choice)

    def time(schedule: Schedule, fitted: Fit) -> float:
        return replace(pipe, schedule=schedule).chosen_time(fitted.limits, fitted.amounts)

    hosts = HostMemory(costs=pipe.costs)
    choice = ScheduleChoice(pipe.module, pipe.tradeoffs, memory, hosts, compiled)
    times = []
    for schedule in searches:
        with suppress(MemoryLimitError):
            _, fitted = choice.best([schedule])
            if schedule is searches[0] and fitted.is_plain:
                assert choice.best(searches)[0] is schedule, "as without a limit"
                return
            times.append(time(schedule, fitted))
    if not times:
        with pytest.raises(MemoryLimitError):
            choice.best(searches)
        return
    schedule, fitted = choice.best(searches)
    assert schedule is not None
    module = compiled(schedule, fitted.limits, fitted.whole, fitted.amounts)
    assert all(peak <= limit for peak, limit in zip(pipe.peaks(module), memory, strict=True))
    assert time(schedule, fitted) <= min(times) * (1 + 1e-9)


@pytest.mark.parametrize("measured", ["halves", "whole", "nothing"])
def test_sections_that_are_not_measured_take_the_time_of_those_that_are(measured: str) -> None:
    vjp = Vjp("f.vjp", "f", "b", (0,), (0,), input="i", weight="w")
    functions = {
        "halves": {"f": 2.0, "i": 3.0, "w": 5.0},
        "whole": {"f": 2.0, "b": 8.0},
        "nothing": {"f": 2.0},
    }[measured]
    times = section_times(vjp, 10, 0.5, Costs(functions=functions))
    expected = {"halves": (9.0, 4.0, 5.0), "whole": (9.0, 5.0, 4.0), "nothing": (5.0, 3.0, 2.0)}
    assert tuple(times[name] for name in "biw") == expected[measured]


def test_ranks_that_a_schedule_keeps_whole_stay_so() -> None:
    schedule = with_whole_backwards(schedules.by_name("zb-h1"), {0})
    assert schedule is not None
    again = with_whole_backwards(schedule, {1})
    assert again is not None
    assert again.whole == {0, 1}
