"""`cg.backward` in a traced step: which calls get a derivative, and for which masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cg.ir.ops import Backward, Call
from cg.ir.ops.module import Vjp
from cg.tracer.record.intrinsics.gradients import backward
from cg.tracer.record.intrinsics.microbatches import mean, microbatches
from cg.tracer.record.trace import Trace

from .step_tools import Bench, PlainStage, opaque


class ManyResultsStage(PlainStage):
    """Takes and gives several values, of which some have no gradient."""

    def several(self, x: Any) -> Any:
        h = self.linear(x)
        return h, h.argmax(), h * 2

    def join(self, a: Any, b: Any, k: Any) -> Any:
        return (self.linear(a) + b + k).sum()

    @opaque
    def log(self, x: Any) -> Any:
        return x * 1


@pytest.fixture
def bench() -> Bench:
    return Bench(2)


def stage(bench: Bench, rank: int = 0, frozen: bool = False) -> Any:
    (actor,) = bench.stages(ManyResultsStage, [rank])
    actor.local.requires_grad_(not frozen)
    return actor


X = torch.ones(4, 4)


def vjps(trace: Trace) -> dict[str, Vjp | None]:
    """The derivative of each call that has a result of its own name."""
    return {
        op.results[0].name: None if op.vjp is None else trace.module.vjps[op.vjp.name]
        for op in trace.module.program.ops
        if isinstance(op, Call)
    }


def masks(vjp: Vjp | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    return None if vjp is None else (vjp.grad_outputs, vjp.grad_inputs)


def test_masks_are_exact(bench: Bench) -> None:
    first, second = stage(bench), stage(bench, 1)

    def step(x: Any) -> Any:
        h, index, double = first.several(x)
        unused = first.forward(x)
        plain = x * 2
        loss = second.join(double, plain, index)
        backward(loss)
        return loss, unused, h

    found = vjps(bench.trace(step, X))
    assert masks(found["several"]) == ((2,), ())
    assert masks(found["forward"]) is None
    assert masks(found["mul"]) is None
    assert masks(found["join"]) == ((0,), (0,))


def test_calls_with_equal_masks_share_a_derivative(bench: Bench) -> None:
    first, second = stage(bench), stage(bench, 1)

    def step(x: Any, k: Any) -> Any:
        losses = []
        for part in microbatches(x, 2):
            h = second.forward(first.forward(part))
            losses.append(second.join(h, part, k))
        h = first.forward(x[:2])
        losses.append(second.join(h, h, k))
        loss = mean(losses)
        backward(loss)
        return loss

    trace = bench.trace(step, X, torch.ones((), dtype=torch.long))
    found = vjps(trace)
    assert found["forward"] is found["forward.2"] is found["forward.4"]
    assert found["join"] is found["join.1"]
    assert masks(found["join"]) == ((0,), (0,))
    assert masks(found["join.2"]) == ((0,), (0, 1))
    assert [name for name in bench.tracer.traced if "vjp" in name] == [
        *("torch.mean.vjp", "torch.stack.vjp", "stage1.join.1.vjp", "stage0.forward.vjp"),
        *("stage1.join.vjp", "stage1.forward.vjp"),
    ]


def test_bodies_and_declarations_of_derivatives_are_registered(bench: Bench) -> None:
    first = stage(bench)
    trace = bench.trace(lambda x: backward(first.forward(x).sum()), X)
    for name in ("stage0.forward.vjp", "torch.sum.vjp"):
        vjp = trace.module.vjps[name]
        assert {vjp.forward, vjp.backward} <= set(trace.module.functions) & set(trace.bodies)
    assert isinstance(trace.module.program.ops[-2], Backward)


def test_frozen_actors_pass_gradients_on(bench: Bench) -> None:
    first, frozen = stage(bench), stage(bench, 1, frozen=True)

    def step(x: Any) -> Any:
        a = frozen.forward(x)
        assert not a.requires_grad
        backward(frozen.forward(first.forward(a)).sum())

    found = vjps(bench.trace(step, X))
    assert masks(found["forward"]) is None
    assert masks(found["forward.1"]) == ((0,), ())
    assert masks(found["forward.2"]) == ((0,), (0,))


def test_several_losses_and_several_backwards(bench: Bench) -> None:
    first = stage(bench)

    def step(x: Any) -> Any:
        for part in microbatches(x, 2):
            a = first.forward(part)
            backward(a.sum(), a.mean().reshape(1))
        return first.forward(x)

    ops = bench.trace(step, X).module.program.ops
    assert [(op.mb, len(op.operands)) for op in ops if isinstance(op, Backward)] == [(0, 2), (1, 2)]


def test_a_loss_of_one_element_is_made_a_scalar(bench: Bench) -> None:
    first = stage(bench)
    trace = bench.trace(lambda x: backward(first.forward(x[:1])[0, :1]), X)
    losses = [op.operands for op in trace.module.program.ops if isinstance(op, Backward)]
    assert [str(value.type) for value in losses[0]] == ["f32[]@0"]


def test_values_may_be_used_after_a_backward(bench: Bench) -> None:
    first = stage(bench)

    def step(x: Any) -> Any:
        h = first.forward(x)
        backward(h.sum())
        first.update()
        return h.detach() * 2

    assert "mul" in vjps(bench.trace(step, X))


def test_under_no_grad_a_backward_still_finds_what_came_before(bench: Bench) -> None:
    first = stage(bench)

    def step(x: Any) -> Any:
        loss = first.forward(x).sum()
        with torch.no_grad():
            backward(loss)

    assert masks(vjps(bench.trace(step, X))["forward"]) == ((0,), ())


def test_a_detached_value_may_go_through_an_opaque_method(bench: Bench) -> None:
    first = stage(bench)

    def step(x: Any) -> Any:
        h = first.forward(x)
        logged = first.log(h.detach())
        with torch.no_grad():
            also = first.log(h)
        cut = first.log(h).detach()
        backward((h * logged * also * cut).sum())

    assert masks(vjps(bench.trace(step, X))["forward"]) == ((0,), ())


def test_outside_of_a_step_it_is_torchs_own() -> None:
    weight = torch.ones(3, requires_grad=True)
    backward((weight * 2).sum(), weight.sum())
    assert weight.grad is not None
    assert weight.grad.tolist() == [3, 3, 3]
    values = [torch.tensor([1.0, 3.0]), torch.tensor([5.0, 7.0])]
    assert mean(value for value in values).item() == 4
    parts = list(microbatches({"a": torch.arange(6), "n": None}, 3))
    assert [part["a"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert all(part["n"] is None for part in parts)
