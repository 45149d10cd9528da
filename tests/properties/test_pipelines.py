"""Every schedule, of every pipeline that it takes, gives the gradients of the plain loop.

The losses and gradients of schedules that split backwards are moreover those of 1F1B bit for bit,
as each stage adds up its microbatches in the same order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import cg
from cg.backends.virtual.world import VirtualExecutable, VirtualWorld
from cg.ir.attributes import Action, Effect
from cg.ir.ops import Call
from cg.launch.api.compiled import Compiled
from cg.launch.api.fusing import Fusing
from cg.launch.world.world import use_world
from cg.passes.schedules import Pipeline
from cg.tracer.record.actors.actors import ActorHandle

from ..sampling import examples
from .pipelines import (
    WIDTH,
    Pipe,
    ResidualStage,
    assert_close,
    draw_pipe,
    gradients,
    inputs,
    make_step,
)
from .traces import SharedTraces

pytestmark = pytest.mark.timeout(300)

STAGES = 16


class Pool:
    """Instances that many pipelines use one after another, so that methods are traced once."""

    def __init__(self) -> None:
        self.instances = {(n, f): ResidualStage(n, f) for n in range(STAGES) for f in range(3)}
        self.traces = SharedTraces()

    def place(self, pipe: Pipe, world: VirtualWorld) -> list[Any]:
        handles = []
        for i, rank in enumerate(pipe.ranks):
            instance = self.instances[i, pipe.frozen_at(i)]
            handles.append(ActorHandle(f"stage{i}", rank, ResidualStage, world, instance))
        return [handles[index] for index in pipe.actors]


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool()


@contextmanager
def tracing_with(pool: Pool) -> Iterator[None]:
    with mock.patch("cg.launch.api.step_function.Functions", return_value=pool.traces):
        yield


def run(pipe: Pipe, pool: Pool) -> tuple[Compiled, Tensor, dict[str, Tensor | None]]:
    """Compile and run a pipeline; hold it against the plain loop."""
    world = VirtualWorld(pipe.world)
    with use_world(world), tracing_with(pool):
        stages = pool.place(pipe, world)
        plain = make_step(pipe, stages)
        expected = plain(*inputs(pipe)).detach()
        wanted = gradients(stages)
        step = cg.trace(plain)
        lowered = step.lower(*inputs(pipe))
        compiled = lowered.compile(schedule=cg.schedules.by_name(pipe.schedule))
        loss = compiled(*inputs(pipe))
        found = gradients(stages)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        assert_close(found, wanted, 1e-10)
        # Again, with ranks that take turns at random and poison in freed slots.
        # In the same form: a BLAS may round a product that it adds to a gradient only once.
        bodies = Fusing(lowered.trace.bodies).plain(compiled.module, world).bodies
        executable = VirtualExecutable(
            compiled.module, bodies, lowered.trace.constants, poison=True, shuffle=3
        )
        given = dict(zip("xy", inputs(pipe), strict=True))
        executable.run([[given[v.name] for v in p.params] for p in compiled.module.programs])
        assert_close(gradients(stages), found, 0)
        return compiled, loss, found


@examples(14, shrinks=True)
@given(seed=st.integers(0, 10**9))
def test_gradients_are_those_of_the_plain_loop(seed: int, pool: Pool) -> None:
    run(draw_pipe(random.Random(seed).randint, 8, STAGES), pool)


@examples(3, shrinks=True)
@given(seed=st.integers(0, 10**9))
def test_stages_that_a_search_lets_recompute_change_nothing(seed: int, pool: Pool) -> None:
    """In little memory, so that most pipelines have such stages, whatever they are like."""
    pipe = replace(draw_pipe(random.Random(seed).randint, 4, 8), remat=frozenset())
    world = VirtualWorld(pipe.world)
    with use_world(world), tracing_with(pool):
        stages = pool.place(pipe, world)
        plain = make_step(pipe, stages)
        expected = plain(*inputs(pipe)).detach()
        wanted = gradients(stages)
        schedule = cg.schedules.auto(1.5, cg.Costs(0.2, 1.0, 1.0), remat=True)
        compiled = cg.trace(plain).lower(*inputs(pipe)).compile(schedule=schedule)
        torch.testing.assert_close(compiled(*inputs(pipe)), expected, rtol=1e-12, atol=0)
        assert_close(gradients(stages), wanted, 1e-10)


RANKS, MICROBATCHES = range(1, 9), range(1, STAGES + 1)


def sizes(schedule: str, p: int) -> list[int]:
    """Numbers of microbatches: of all pairs of sizes each falls to one schedule, or to two.

    A schedule meets each number of ranks with one to three numbers of microbatches, and each
    number of microbatches with at least one of ranks.
    """
    names = cg.schedules.names()
    at = names.index(schedule)
    # There is one schedule more than numbers of ranks, so one pair more to give to 3 ranks.
    turns = {p, 0} if p == 3 else {p}
    return [m for m in MICROBATCHES if (at - m) % len(names) in turns]


def covering(schedule: str, p: int, m: int) -> Pipe:
    """A pipeline with about half of the features, another half for the next size or schedule."""
    loops = 2 if schedule in ("interleaved", "looped-bfs") and m % p == 0 and p > 1 else 1
    vee = schedule in ("zb-v", "dualpipe-v")
    ranks = (*range(p), *reversed(range(p))) if vee else tuple(range(p)) * loops
    last = len(ranks) - 1
    bits = random.Random(f"{schedule} {p} {m}")
    return Pipe(
        ranks,
        m,
        ((0, last),) if last and bits.random() < 0.6 else (),
        tied=bits.random() < 0.6,
        embeds=bits.random() < 0.4,
        several=bits.random() < 0.6,
        frozen=(*(bits.choice((0, 1, 2)) for _ in range(last)), 0),
        shared=loops > 1 and bits.random() < 0.4,
        remat=frozenset({last // 2}) if bits.random() < 0.3 else frozenset(),
        schedule=schedule,
    )


def run_sizes(schedule: str, p: int, counts: Iterable[int], pool: Pool) -> None:
    for m in counts:
        pipe = covering(schedule, p, m)
        try:
            compiled, _, _ = run(pipe, pool)
        except BaseException as error:
            error.add_note(str(pipe))
            raise
        if not pipe.shared:
            assert_order(compiled, pipe.ranks, m, schedule)


@pytest.mark.grid(3)
@pytest.mark.parametrize("schedule", cg.schedules.names())
@pytest.mark.parametrize("p", RANKS)
def test_every_size(schedule: str, p: int, pool: Pool) -> None:
    run_sizes(schedule, p, sizes(schedule, p), pool)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", cg.schedules.names())
@pytest.mark.parametrize("p", RANKS)
def test_every_size_under_every_schedule(schedule: str, p: int, pool: Pool) -> None:
    """1152 pipelines."""
    run_sizes(schedule, p, MICROBATCHES, pool)


def test_each_schedule_meets_each_size_and_feature() -> None:
    names = cg.schedules.names()
    met = {(s, p, m) for s in names for p in RANKS for m in sizes(s, p)}
    assert {(p, m) for _, p, m in met} == {(p, m) for p in RANKS for m in MICROBATCHES}
    assert {(s, p) for s, p, _ in met} == {(s, p) for s in names for p in RANKS}
    assert {(s, m) for s, _, m in met} == {(s, m) for s in names for m in MICROBATCHES}
    for schedule in names:
        pipes = [covering(*size) for size in met if size[0] == schedule]
        for feature in ("skips", "tied", "embeds", "several", "remat"):
            assert {bool(getattr(pipe, feature)) for pipe in pipes} == {False, True}, feature
        assert {kind for pipe in pipes for kind in pipe.frozen} == {0, 1, 2}


@pytest.mark.parametrize("schedule", cg.schedules.names())
def test_sums_in_the_same_order_have_the_same_bits(schedule: str, pool: Pool) -> None:
    """Every schedule runs the microbatches of a stage in order, W as well as B.

    But when the gradient of a lent weight is added to those of its own stage depends on it.
    """
    pipe = replace(covering(schedule, 4, 8), tied=False, several=True, shared=False)
    _, loss, found = run(pipe, pool)
    _, other, wanted = run(replace(pipe, schedule="1f1b"), pool)
    assert torch.equal(loss, other)
    assert_close(found, wanted, 0)


def assert_order(compiled: Compiled, ranks: Sequence[int], m: int, schedule: str) -> None:
    """Hold the tasks of each rank's program against what the schedule says."""
    order = cg.schedules.by_name(schedule)(Pipeline(tuple(ranks), m))
    for program in compiled.module.programs:
        calls = [op for op in program.ops if isinstance(op, Call)]
        functions = compiled.module.functions
        tasks = [op.task for op in calls if op.task and functions[op.fn.name].actor]
        seen = list(dict.fromkeys(tasks))
        wanted = [task for task in order.get(program.rank or 0, ()) if task in seen]
        assert [task for task in seen if task in wanted] == wanted
        extra = {task.action for task in seen if task not in wanted}
        assert extra <= {Action.WEIGHT}


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2", "auto"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 3), (4, 10)])
def test_split_backwards_change_no_bit(schedule: str, p: int, m: int, pool: Pool) -> None:
    pipe = Pipe(tuple(range(p)), m, ((0, p - 1),) if p > 2 else (), tied=True)
    _, loss, found = run(pipe, pool)
    compiled, other, split = run(replace(pipe, schedule=schedule), pool)
    assert torch.equal(loss, other)
    assert_close(split, found, 0)
    assert any(
        op.task and op.task.action is Action.WEIGHT for op in compiled.module.programs[1].ops
    )


def test_recomputing_needs_less_memory(pool: Pool) -> None:
    pipe = Pipe((0, 1), 8, schedule="gpipe")
    plain, _, found = run(pipe, pool)
    remat, _, again = run(replace(pipe, remat=frozenset({0, 1})), pool)
    assert_close(again, found, 0)
    before, after = (c.memory_analysis()[0].values for c in (plain, remat))
    assert before - after == 8 * WIDTH * 8  # the tanh of each microbatch


@cg.actor
class Normed(nn.Module):
    """Each call updates the statistics of a batch norm, and a buffer that another method reads."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)))

    def scaled(self, x: Tensor) -> Tensor:
        return self.linear(x * self.scale)

    def track(self, x: Tensor) -> Tensor:
        self.scale = 0.9 * self.scale + x.detach().abs().mean(0)
        return x

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x - y) ** 2).mean()


def normed_step(stages: Sequence[Any], m: int, scaled: bool) -> Callable[..., Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        losses = []
        for part, target in cg.microbatches((x, y), m):
            for stage in stages:
                part = stage.forward(part)
                if scaled:
                    part = stage.scaled(stage.track(part))
            losses.append(stages[-1].loss(part, target))
        loss = cg.mean(losses)
        cg.backward(loss)
        return loss

    return step


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
def test_updates_of_buffers_do_not_hold_up_backwards(schedule: str, scaled: bool) -> None:
    """Statistics change in the order of the microbatches, before earlier backwards have run.

    What a backward needs of a buffer is what it was when its forward ran.
    """
    p, m = 3, 5
    x, y = (torch.randn(3 * m, WIDTH, dtype=torch.float64) for _ in range(2))
    with use_world(VirtualWorld(p)):
        eager, stages = ([Normed.on(i)(i) for i in range(p)] for _ in range(2))
        expected = normed_step(eager, m, scaled)(x, y)
        lowered = cg.trace(normed_step(stages, m, scaled)).lower(x, y)
        compiled = lowered.compile(schedule=cg.schedules.by_name(schedule))
        torch.testing.assert_close(compiled(x, y), expected.detach(), rtol=1e-12, atol=0)
        for one, other in zip(eager, stages, strict=True):
            state = other.local.state_dict()
            for name, value in one.local.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-14)
        assert_close(gradients(stages), gradients(eager), 1e-10)
    effects = {f.name.partition(".")[2]: f.effect for f in compiled.module.functions.values()}
    assert effects["forward.vjp.forward"] is Effect.UPDATE
