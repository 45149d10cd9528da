"""Gradients come in buckets: one is reduced while the backward computes those of the next."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg
from cg.ir.attributes import Effect, Traffic
from cg.ir.ops import Call, Collective, Free, Op, Wait
from cg.ir.ops.module import Module, Program
from cg.ir.text.printer import format_module
from cg.tracer.values.gradient_buckets import BUCKET, Buckets

from ...worlds import virtual_world
from .training import Block, Model, Tower, batch, meshes, step_of, train

ROWS = {"forward(x)|loss(h)|loss(y)": cg.cut(0, "dp")}
PAIR = 4 * 2 * 8 * 16
"""Bytes of the gradients of a pair of layers of `Tower`."""

_world = virtual_world(8, threads=1, scope="module")


def tower(bucket_bytes: int = PAIR, depth: int = 3, **on: Any) -> Any:
    """A tower of some pairs of layers on two ranks, which share its batch."""
    model = Model([(Tower, (0, "sgd", 8, depth))])
    (stage,) = model.on([cg.mesh(dp=2)], [ROWS], bucket_bytes=bucket_bytes, **on)
    return stage


def compiled(stage: Any, count: int = 1, **options: Any) -> Any:
    return cg.trace(step_of([stage], count)).lower(*batch(0, 8, "reals")).compile(**options)


def places(program: Program, *words: str) -> list[int]:
    """The places of calls of functions with one of some words in their names."""
    return [
        at
        for at, op in enumerate(program.ops)
        if isinstance(op, Call) and any(word in op.fn.name for word in words)
    ]


def reductions(module: Module, program: Program) -> list[int]:
    """The places of collectives that add up gradients."""
    return [
        at
        for at, op in enumerate(program.ops)
        if isinstance(op, Collective)
        and op.chan is not None
        and module.channels[op.chan].traffic is Traffic.REDUCE
    ]


def awaited(program: Program, op: Op) -> int:
    """Where a rank waits for a collective."""
    (at,) = [
        at
        for at, other in enumerate(program.ops)
        if isinstance(other, Wait) and other.operands[0] in op.results
    ]
    return at


# -- when -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4])
def test_a_bucket_is_reduced_between_two_parts_of_the_last_backward(count: int) -> None:
    made = compiled(tower(), count)
    for rank in range(2):
        program = made.module.program_of(rank)
        begun = reductions(made.module, program)
        assert len(begun) == 3, "each bucket once a step, however many microbatches there are"
        *_, first, second, third = places(program, "forward.vjp.backward.part")
        assert first < begun[0] < second < begun[1] < third < begun[2]
        # Its result is taken in behind the next part, which computes while it travels.
        ends = [awaited(program, program.ops[at]) for at in begun]
        (update,) = places(program, ".update")
        assert begun[1] < ends[0] < third < begun[2] < ends[1] < ends[2] < update


def test_halves_of_backwards_are_cut_as_well() -> None:
    """With tasks W, gradients are there in these; the cotangent does not wait for them."""
    model = Model([(Tower, (seed, "sgd", 8, 2)) for seed in range(2)])
    stages = model.on(cg.mesh(pp=2, dp=2).unbind("pp"), [ROWS] * 2, bucket_bytes=PAIR)
    made = cg.trace(step_of(stages, 4)).lower(*batch(0, 16, "reals"))
    module = made.compile(schedule=cg.schedules.zb_h1()).module
    for rank in (0, 3):
        program = module.program_of(rank)
        begun = reductions(module, program)
        *_, first, second = places(program, "forward.vjp.weight.part", "forward.vjp.backward.part")
        assert len(begun) == 2
        assert first < begun[0] < second < begun[1]


def test_reductions_travel_while_the_backward_computes() -> None:
    """On paper: of the three milliseconds that all gradients travel, two are hidden."""
    link = cg.Link(bandwidth=PAIR / 1e6)  # a bucket travels for a millisecond

    def end(limit: int) -> float:
        stage = tower(limit)
        costs = cg.Costs(tf=1.0, tb=3.0, tw=3.0, link=link, functions={f"{stage.name}.update": 0.5})
        return float(compiled(stage).simulate(costs).end)

    assert end(PAIR) == pytest.approx(1.0 + 6.0 + 1.0 + 0.5, abs=0.05)
    assert end(BUCKET) == pytest.approx(1.0 + 6.0 + 3.0 + 0.5, abs=0.05)


def test_stored_parameters_are_reduced_layer_by_layer() -> None:
    """Their backward is cut at layers anyway, and their gradients need no cut of their own."""
    for keep in "task", "step":
        made = compiled(tower(store=cg.cut(0, "dp")), fsdp=cg.fsdp(keep=keep))
        program = made.module.program_of(0)
        parts = places(program, "forward.vjp.backward.part")
        begun = reductions(made.module, program)
        assert len(begun) == 3
        assert begun[0] < parts[-2] < begun[1] < parts[-1] < begun[2]
        assert parts[-2] < awaited(program, program.ops[begun[0]])


# -- what -----------------------------------------------------------------------------------


def test_buckets_are_filled_in_the_order_in_which_gradients_are_there() -> None:
    made = Buckets(100)
    made.enter([("d", 60), ("c", 40), ("b", 1), ("large", 500), ("a", 10)])
    assert made.of == {"d": 0, "c": 0, "b": 1, "large": 2, "a": 3}
    made.enter([("c", 40), ("late", 90), ("later", 1)])
    assert made.of["late"] == 3
    assert made.of["later"] == 4


def test_less_than_a_bucket_changes_nothing() -> None:
    usual, exact = (text_of(tower(limit)) for limit in (BUCKET, 3 * PAIR))
    assert "buckets =" not in usual
    assert "effect = reduce" not in usual
    assert exact == usual


def text_of(stage: Any) -> str:
    return format_module(compiled(stage).module).replace(stage.name, "tower")


def test_a_part_says_to_which_buckets_it_adds() -> None:
    functions = compiled(tower()).module.functions.values()
    parts = [f for f in functions if "forward.vjp.backward.part" in f.name]
    assert [f.gradient_buckets for f in parts] == [(0,), (1,), (2,)]
    assert {f.gradient_buckets for f in functions if f.effect is Effect.REDUCE} == {
        (0,),
        (1,),
        (2,),
    }


def test_what_was_saved_for_a_part_is_freed_behind_it() -> None:
    """Before the next one runs, so that its gradients take memory that the last one has left."""
    program = compiled(tower(PAIR, depth=8)).module.program_of(0)
    parts = places(program, "forward.vjp.backward.part")
    assert len(parts) == 8
    for part, following in itertools.pairwise(parts):
        freed = {op.operands[0] for op in program.ops[part:following] if isinstance(op, Free)}
        reads = [op for op in program.ops[following:] if not isinstance(op, Free)]
        later = {value for op in reads for value in op.operands}
        saved = [v for v in program.ops[part].operands if ".saved." in v.name and v not in later]
        assert saved, "a part reads what was saved for it alone"
        assert freed.issuperset(saved)


# -- values ---------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_pipelines_with_norms_train_in_buckets(schedule: str) -> None:
    """Of gradients that are cut along tp, that are whole, and that are sums along tp, too."""
    model = Model([(Block, (seed, "adam")) for seed in range(2)])
    stages = model.on(meshes("pp-dp-tp"), bucket_bytes=100)
    train(model, stages, 16, 4, schedule, "reals", steps=2)


def test_uneven_ranks_agree_on_buckets() -> None:
    model = Model([(Block, (0, "adam"))])
    stages = model.on([cg.mesh(dp=3, tp=1)], bucket_bytes=100)
    train(model, stages, 14, 2, None, "reals", steps=2)


@cg.actor
class Tied(nn.Module):
    """Uses one weight in two methods, and has gradients that stay from step to step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))

    def loss(self, h: Tensor) -> Tensor:
        return self.first(h).square().mean()

    @cg.opaque
    def double(self) -> None:
        """Change the gradients."""
        for parameter in self.parameters():
            parameter.grad.mul_(2)


PLAN = {"forward(x)|loss(h)": cg.cut(0, "dp")}


@pytest.mark.parametrize("count", [1, 2])
def test_a_weight_of_two_methods_and_two_losses(count: int) -> None:
    """It is reduced behind the last that adds to it; what follows finds it reduced."""

    def work(actor: Any, x: Tensor, backward: Any, parts: Any) -> None:
        for _ in range(2):
            for part in parts(x, count):
                backward(actor.loss(actor.forward(part)))
            actor.double()

    actor = Tied.on(cg.mesh(dp=2), plan=PLAN, bucket_bytes=1)()  # type: ignore[attr-defined]
    alone = Tied()

    @cg.trace
    def step(x: Tensor) -> None:
        work(actor, x, cg.backward, cg.microbatches)

    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(2):  # gradients of before the step count once
        step(x)
        work(alone, x, torch.autograd.backward, torch.chunk)
    for rank in range(2):
        mine = dict(actor.instances[rank].named_parameters())
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(mine[name].grad, parameter.grad)


def test_clipping_finds_all_buckets_reduced() -> None:
    actor = Tied.on(cg.mesh(dp=2), plan=PLAN, bucket_bytes=1)()  # type: ignore[attr-defined]
    alone = Tied()

    @cg.trace
    def step(x: Tensor) -> Tensor:
        cg.backward(actor.loss(actor.forward(x)))
        return cg.clip_grad_norm([actor], 0.1)

    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    norm = step(x)
    alone.loss(alone.forward(x)).backward()
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(alone.parameters(), 0.1))


def test_a_bucket_of_no_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket_bytes is at least 1, not 0"):
        Tied.on(cg.mesh(dp=2), plan=PLAN, bucket_bytes=0)  # type: ignore[attr-defined]
