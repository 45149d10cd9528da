"""While one rank traces a method, others trace it for their own actors of the class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cg.ir.attributes import Effect
from cg.ir.printer import format_module
from cg.tracer.errors import TraceError
from cg.tracer.functions import Functions
from cg.tracer.interface import MethodTarget, TracedFunction
from cg.tracer.opaque import opaque
from cg.tracer.specs import Tree
from cg.tracer.trace import Trace

from .function_tools import signature
from .step_tools import EagerTracer
from .test_step_world import RANKS, Exchange, everywhere

X = torch.arange(8.0).reshape(2, 4)


class NotingTracer(EagerTracer):
    """Notes what it is asked for, in `log`; a draft is the name of its call."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange
        self.log: list[str] = []

    def draft(self, target: Any, signature: Tree, loc: Any) -> Any:
        name = f"{target.actor}.{target.method}"
        self.log.append(f"draft {name}")
        if target.method == "fails":
            raise ValueError("no such thing")
        return name

    def trace(
        self, target: Any, signature: Tree, name: str, loc: Any, draft: Any = None
    ) -> TracedFunction:
        if isinstance(target, MethodTarget):
            self.log.append(f"trace {name}" + (f" by {draft}" if draft is not None else ""))
        with self._exchange.turn:
            return super().trace(target, signature, name, loc)


def noted(fn: Callable[[list[Any]], Callable[..., Any]]) -> tuple[list[list[str]], list[Any]]:
    """What each rank's tracer was asked for, and what tracing gave there."""
    tracers: dict[int, NotingTracer] = {}

    def make(rank: int, exchange: Exchange) -> NotingTracer:
        tracers[rank] = NotingTracer(exchange)
        return tracers[rank]

    outcomes = everywhere(fn, make)
    return [tracers[rank].log for rank in range(RANKS)], outcomes


def frozen(stages: list[Any]) -> list[Any]:
    """So that what the stages return requires no gradient, as what the step is given."""
    for stage in stages:
        if stage.is_local:
            stage.local.requires_grad_(False)
    return stages


def test_the_third_of_a_class_is_traced_while_the_second_is() -> None:
    def chain(stages: list[Any]) -> Callable[..., Any]:
        def step(x: Any) -> Any:
            for stage in stages:
                x = stage.forward(x)["h"]
            return stages[-1].loss(x, x)

        return step

    logs, traces = noted(lambda stages: chain(frozen(stages)))
    assert logs == [
        ["trace stage0.forward"],
        ["trace stage1.forward"],
        ["draft stage2.forward", "trace stage2.forward by stage2.forward", "trace stage2.loss"],
    ]
    assert len({format_module(trace.module, locations=True) for trace in traces}) == 1


def test_not_of_another_line_or_with_other_arguments() -> None:
    def apart(stages: list[Any]) -> Callable[..., Any]:
        def step(x: Any) -> Any:
            y = stages[0].forward(x)["h"]
            y = stages[1].forward(y)["h"]
            for part in (y, y[:2]):
                y = stages[2].forward(part)["h"]
            return y

        return step

    logs, _ = noted(lambda stages: apart(frozen(stages)))
    assert logs[2] == ["trace stage2.forward", "trace stage2.forward.1"]


def test_not_of_who_has_had_its_turn() -> None:
    """The first stage takes what requires no gradient, the others what requires one."""

    def around(stages: list[Any]) -> Callable[..., Any]:
        def step(x: Any) -> Any:
            for stage in (*stages, *stages):
                x = stage.forward(x)["h"]
            return x

        return step

    logs, _ = noted(around)
    assert logs == [
        ["trace stage0.forward", "trace stage0.forward.1"],
        ["trace stage1.forward"],
        ["trace stage2.forward"],
    ]


def test_what_is_called_no_more_is_forgotten() -> None:
    def two(stages: list[Any]) -> Callable[..., Any]:
        def step(x: Any) -> Any:
            for stage in stages[:2]:
                x = stage.forward(x)["h"]
            return x

        return step

    logs, traces = noted(lambda stages: two(frozen(stages)))
    assert logs[2] == ["draft stage2.forward"]
    assert all(isinstance(trace, Trace) for trace in traces)
    assert "stage2" not in format_module(traces[2].module)


def test_what_fails_ahead_of_a_call_says_so_when_the_call_comes() -> None:
    def failing(stages: list[Any], calls: int) -> Callable[..., Any]:
        def step(x: Any) -> Any:
            for stage, name in zip(stages, ("update", "update", "fails")[:calls], strict=False):
                stage.__getattr__(name)() if name == "update" else stage.fails(x)
            return x

        return step

    logs, outcomes = noted(lambda stages: failing(stages, 2))
    assert logs[2] == ["draft stage2.update"]
    assert all(isinstance(trace, Trace) for trace in outcomes)

    def fails(stages: list[Any]) -> Callable[..., Any]:
        def step(x: Any) -> Any:
            for stage in stages:
                try:
                    stage.fails(x)
                except TraceError:
                    if stage is stages[-1]:
                        raise
            return x

        return step

    logs, outcomes = noted(fails)
    assert logs[2] == ["draft stage2.fails", "trace stage2.fails"]
    assert all("@stage2.fails raised ValueError" in str(error) for error in outcomes)


class Counter(nn.Module):
    """Has state that its methods read, update and change for good."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.ones(4))
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.seen * self.scale

    def update(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.sum(0)
        return x

    @opaque
    def look(self, x: Tensor) -> Tensor:
        return x


def drafted(actor: Counter, method: str) -> tuple[Functions, MethodTarget, Any]:
    functions, target = Functions(), MethodTarget("actor", actor, method)
    return functions, target, functions.draft(target, signature(X), None)


def test_a_draft_becomes_what_would_have_been_traced() -> None:
    actor = Counter()
    functions, target, draft = drafted(actor, "forward")
    made = functions.trace(target, signature(X), "actor.forward.7", None, draft)
    plain = Functions().trace(target, signature(X), "actor.forward.7", None)
    assert made.declaration == plain.declaration
    assert made.declaration.name == "actor.forward.7"
    assert torch.equal(made.body(X)[0], actor(X))
    assert made.guard is not None
    assert made.guard() is None


def test_a_draft_of_an_actor_that_has_changed_is_not_taken() -> None:
    actor = Counter()
    functions, target, draft = drafted(actor, "forward")
    actor.scale = 3.0
    made = functions.trace(target, signature(X), "actor.forward", None, draft)
    assert made.guard is not None
    assert made.guard() is None
    assert torch.equal(made.body(X)[0], actor(X))


@pytest.mark.parametrize("is_drafted", [False, True])
def test_a_draft_that_is_not_taken_changes_no_effect(is_drafted: bool) -> None:
    """An update that comes behind a backward that reads the same state is a write."""
    functions, target = Functions(), MethodTarget("actor", Counter(), "update")
    if is_drafted:
        functions.draft(target, signature(X), None)
    forward = MethodTarget("actor", target.instance, "forward")
    traced = functions.trace_vjp(forward, signature(X), "actor.forward.vjp", (0,), (), None)
    assert traced.backward.effect is Effect.ACCUMULATE
    made = functions.trace(target, signature(X), "actor.update", None)
    assert made.declaration.effect is Effect.WRITE


def test_opaque_methods_are_not_traced_ahead() -> None:
    functions, target, draft = drafted(Counter(), "look")
    assert draft is None
    assert functions.trace(target, signature(X), "actor.look", None, draft).strict is not None
