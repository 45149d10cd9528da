"""The two halves of the tracer together: what one tells the other is what the other needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cg.ir.attributes import Effect
from cg.ir.ops.module import FunctionKind
from cg.ir.types import Place
from cg.passes.schedules import gpipe
from cg.tracer.errors import TraceError
from cg.tracer.function.functions import Functions
from cg.tracer.record.intrinsics.gradients import backward
from cg.tracer.values.opaque import opaque
from cg.tracer.values.values import OBJECT

from .step_tools import Bench, PlainStage, refusal
from .test_step_equality import Compiled


class OptimizedStage(PlainStage):
    """Writes to its state by an optimizer, in place, and in an opaque method."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.kept: list[Any] = []

    def tick(self) -> None:
        self.count.add_(1)

    def ticks(self) -> Any:
        return self.count

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @opaque
    def say(self, word: Any) -> Any:
        return f"{word}!"

    @opaque(fake=lambda self, x: torch.empty_like(x))
    def keep(self, x: Any) -> Any:
        self.kept.append(x)
        return x.detach() * 2


X = torch.arange(16.0).reshape(4, 4)


@pytest.fixture
def bench() -> Bench:
    bench = Bench(2)
    bench.tracer = Functions()  # type: ignore[assignment]
    return bench


def stages(bench: Bench) -> list[Any]:
    return bench.stages(OptimizedStage, range(2))


def test_live_state_after_a_write(bench: Bench) -> None:
    first, second = stages(bench)

    def buffer(x: Any) -> Any:
        count = first.ticks()
        first.tick()
        return x + count

    def parameter(x: Any) -> Any:
        weight = first.weight()
        first.update()
        return x @ weight

    def other_actor(x: Any) -> Any:
        weight = first.weight()
        second.update()
        return x @ weight

    for step in (buffer, parameter):
        error = refusal(bench, step, X)
        assert "is state of stage0 itself, and stage0 has been written to since" in error.reason
    bench.trace(other_actor, X)


class Clamping(torch.nn.Module):
    """Has a parameter to which its forward writes, another, and a view of that one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((4,), 2.0))
        self.weight = torch.nn.Parameter(torch.ones(4, 4))
        self.row = self.weight.data[0]

    def read(self) -> Any:
        return self.weight

    def forward(self, x: Any) -> Any:
        self.scale.data.clamp_(-1, 1)
        return x * self.scale

    def write_row(self, x: Any) -> Any:
        self.row.zero_()
        return x


def test_live_state_after_a_write_to_other_state(bench: Bench) -> None:
    first, _ = bench.stages(Clamping, range(2))

    def other(x: Any) -> Any:
        weight = first.read()
        return first.forward(x) @ weight

    def same(x: Any) -> Any:
        weight = first.read()
        return first.write_row(x) @ weight

    bench.trace(other, X)
    error = refusal(bench, same, X)
    assert "is state of stage0 itself, and stage0 has been written to since" in error.reason


def test_writes_into_state_and_into_what_is_kept(bench: Bench) -> None:
    first, _ = stages(bench)

    def state(x: Any) -> Any:
        weight = first.weight()
        weight += 1

    def kept(x: Any) -> Any:
        h = x + 1
        first.keep(h)
        h += 1

    with pytest.raises(TraceError, match="%weight, and it is state of the actor stage0"):
        bench.trace(state, X)
    with pytest.raises(TraceError, match=r"%add, and the opaque method @stage0.keep may have"):
        bench.trace(kept, X)


def test_no_gradient_goes_through_an_opaque_method(bench: Bench) -> None:
    first, second = stages(bench)

    def step(x: Any) -> Any:
        h = first.forward(x)
        backward((second.forward(h) * first.keep(h)).sum())

    def detached(x: Any) -> Any:
        h = first.forward(x)
        backward((second.forward(h) * first.keep(h.detach())).sum())

    error = refusal(bench, step, X)
    assert "what the opaque method @stage0.keep made of values that require grad" in error.reason
    bench.trace(detached, X)


def test_an_optimizer_runs_as_it_is(bench: Bench) -> None:
    first, _ = stages(bench)

    def step(x: Any) -> Any:
        loss = first.forward(x).mean()
        backward(loss)
        first.update()
        return loss

    trace = bench.trace(step, X)
    update = trace.module.functions["stage0.update"]
    assert (update.kind, update.effect) == (FunctionKind.OPAQUE, Effect.WRITE)
    compiled = Compiled(trace, gpipe())
    weight = first.local.linear.weight
    before = weight.detach().clone()
    compiled(X)
    expected = before - 0.1 * X.mean(0).expand(4, 4) / 4
    torch.testing.assert_close(weight.detach(), expected)
    assert weight.grad is None


def test_objects_run_through_a_chain(bench: Bench) -> None:
    first, second = stages(bench)

    def chain(word: Any) -> Any:
        return {"said": second.say(first.say(word))}

    trace = bench.trace_at(chain, (OBJECT,), inputs=Place.of(0))
    assert Compiled(trace, gpipe())("hello") == [{"said": "hello!!"}] * 2


def test_values_without_contiguous_layout(bench: Bench) -> None:
    first, second = stages(bench)

    def step(x: Any) -> Any:
        t = x.T
        h = t.reshape(2, 8) + x.t()[::2].repeat(1, 2)
        return second.forward(first.forward(t)).T.reshape(-1), h, t.transpose(0, 1)[1:]

    trace = bench.trace(step, X)
    t = X.T
    expected = (
        second.local(first.local(t)).T.reshape(-1),
        t.reshape(2, 8) + X.t()[::2].repeat(1, 2),
        t.transpose(0, 1)[1:],
    )
    for result in Compiled(trace, gpipe())(X):
        for one, other in zip(result, expected, strict=True):
            torch.testing.assert_close(one, other.detach())
