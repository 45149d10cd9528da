"""Gradients are reduced once a step, in buckets, while other ranks are still at work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cg
from cg.ir.ops import Call, Collective, Op, Wait
from cg.ir.ops.module import Program
from cg.ir.verify.communication import TimeSpan

from ...worlds import virtual_world
from .training import Block, Model, batch, meshes, step_of

MICROBATCHES, STAGES = 4, 2

_world = virtual_world(8)


def compiled(schedule: str) -> tuple[list[Any], Any]:
    """Two stages, each data and tensor parallel, and their step."""
    model = Model([(Block, (seed, "sgd")) for seed in range(STAGES)])
    stages = model.on(meshes("pp-dp-tp"))
    step = cg.trace(step_of(stages, MICROBATCHES)).lower(*batch(0, 8, "reals"))
    return stages, step.compile(schedule=cg.schedules.by_name(schedule))


def calls(program: Program, *words: str) -> list[int]:
    """The places of calls of functions with one of some words in their names."""
    return [
        at
        for at, op in enumerate(program.ops)
        if isinstance(op, Call) and any(word in op.fn.name for word in words)
    ]


BACKWARD = (".backward", ".input", ".weight")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_each_bucket_is_reduced_once_behind_the_last_backward(schedule: str) -> None:
    stages, made = compiled(schedule)
    for stage in stages:
        for rank in stage.place.ranks:
            program = made.module.program_of(rank)
            (read,) = calls(program, "reduce_gradients.read")
            writes = calls(program, "reduce_gradients.write")
            (update,) = calls(program, ".update")
            backwards = calls(program, *BACKWARD)
            assert len(backwards) >= MICROBATCHES
            assert max(backwards) < read < min(writes) <= max(writes) < update
            within = program.ops[read : max(writes)]
            reductions = [op for op in within if isinstance(op, Collective)]
            # A bucket each: of what is cut along tp, of what is whole, and of the norms, to whose
            # gradients the ranks along tp add parts, too.
            assert len(reductions) == len(program.ops[read].results) == len(writes) == 3
            sums = [op for op in program.ops if isinstance(op, Collective) and op.mb is None]
            assert reductions == [op for op in sums if op not in program.ops[:read]]
            assert begun_before_any_is_awaited(within, reductions)


def begun_before_any_is_awaited(ops: list[Op], reductions: list[Collective]) -> bool:
    made = {op.results[0] for op in reductions}
    waits = [at for at, op in enumerate(ops) if isinstance(op, Wait) and op.operands[0] in made]
    return max(map(ops.index, reductions)) < min(waits)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_last_stage_reduces_in_the_cool_down(schedule: str) -> None:
    """Its gradients have been put back before the first stage ends its backward."""
    (first, last), made = compiled(schedule)
    names = [name for name in made.module.functions if ".reduce_gradients." in name]
    link = cg.Link(latency=0.2, bandwidth=1.0)
    costs = cg.Costs(tf=1.0, tb=1.0, tw=1.0, functions=dict.fromkeys(names, 0.05), link=link)
    spans = made.simulate(costs).spans
    ends = [end_of(spans, rank, *BACKWARD) for rank in first.place.ranks]
    written = [end_of(spans, rank, "reduce_gradients.write") for rank in last.place.ranks]
    assert max(written) < min(ends)
    alone = made.simulate(cg.Costs(tf=1.0, tb=1.0, tw=1.0))
    # What the first stage reduces comes behind everything: only that is to be seen.
    reduced = [end_of(spans, rank, "reduce_gradients.write") for rank in first.place.ranks]
    assert max(reduced) - max(ends) < 3 * 0.2 + 4 * 0.05 + 0.01
    assert max(ends) > alone.end - 1.0


def end_of(spans: tuple[TimeSpan, ...], rank: int, *words: str) -> float:
    """When the last call on a rank with one of some words in its name has ended."""
    return max(
        span.end
        for span in spans
        if span.rank == rank
        and isinstance(span.op, Call)
        and any(word in span.op.fn.name for word in words)
    )


def test_one_actor_alone_reduces_behind_its_backward() -> None:
    torch.manual_seed(0)
    actor = Block.on(cg.mesh(dp=2, tp=1), plan={"forward(x)|loss(h)|loss(y)": cg.cut(0, "dp")})  # type: ignore[attr-defined]
    stage = actor(0, "sgd")
    made = cg.trace(step_of([stage], 1)).lower(*batch(0, 4, "reals")).compile()
    program = made.module.program_of(0)
    (read,), (write,) = (calls(program, f"reduce_gradients.{word}") for word in ("read", "write"))
    assert max(calls(program, *BACKWARD)) < read
    reductions = [op for op in program.ops[read:write] if isinstance(op, Collective)]
    assert len(reductions) == 1


@pytest.mark.parametrize(("bias", "type_"), [(False, "f32[3,4]"), (True, "f32[15]")])
def test_a_single_gradient_is_reduced_where_it_lies(bias: bool, type_: str) -> None:
    """Several small ones are packed; one alone keeps its shape, and nothing is copied."""
    torch.manual_seed(0)

    class Layer(torch.nn.Linear):
        def loss(self, x: torch.Tensor) -> torch.Tensor:
            return self(x).square().sum()

    actor = cg.actor(Layer).on(cg.mesh(dp=2), plan={"loss(x)": cg.cut(0, "dp")})(4, 3, bias=bias)

    @cg.trace
    def step(x: torch.Tensor) -> Any:
        loss = actor.loss(x)
        cg.backward(loss)
        return loss

    (read,) = [
        function
        for name, function in step.lower(torch.randn(6, 4)).compile().module.functions.items()
        if name.endswith("reduce_gradients.read")
    ]
    assert list(map(str, read.outputs)) == [type_]
