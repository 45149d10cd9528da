"""Assertions on the values of tensors are checked in each execution of a traced method."""

from __future__ import annotations

import pytest
import torch

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from cg.tracer.errors import TraceError

from .asserting import Asserting
from .function_tools import check_equal, run_traced, trace

X = torch.arange(6.0).view(2, 3)
"""For which all assertions hold."""


@pytest.mark.parametrize(
    ("method", "wrong", "line"),
    [
        ("number", X + 1, "assert x.max().item() <= 5"),
        ("precise", X + 0.1, "assert 0.1 > x[0, 0].item()"),
        ("called", X / 0, "assert torch.isfinite(x).all()"),
        ("named", X + 1, "assert small"),
        ("chained", X + 1, "assert (x < 6).all()"),
        ("chained", X - 2, "-1 < x.min() < 9"),
        ("counted", X + 1, "count.item() == 3"),
        ("counted", torch.tensor([[3.0, 3, 9], [0, 0, 0]]), "(x < 9).all()"),
        ("counted", torch.tensor([[3.0, 3, 3], [0, 0, -1]]), "x.min().item() > -1"),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_checked_when_it_runs(method: str, wrong: torch.Tensor, line: str, grad: bool) -> None:
    check_equal(Asserting(), method, X.clone().requires_grad_(grad))
    with pytest.raises(AssertionError):
        getattr(Asserting(), method)(wrong)
    with pytest.raises(
        RuntimeError, match=r"an assertion does not hold, at .*asserting\.py"
    ) as error:
        run_traced(Asserting(), method, (wrong.requires_grad_(grad),), {}, 0)
    assert line in str(error.value)


@pytest.mark.parametrize(
    "method",
    [
        *("either", "negated", "less_or", "less_not", "chosen", "listed", "computed", "bare"),
        *("asked", "behind"),
    ],
)
def test_what_is_not_a_plain_assertion_is_refused(method: str) -> None:
    getattr(Asserting(), method)(X)
    with pytest.raises(TraceError, match="value of a tensor"):
        trace(Asserting(), method, X)


def test_a_call_that_checks_stays_though_nothing_uses_it() -> None:
    @cg.actor
    class Checking(Asserting):
        def check(self, x: torch.Tensor) -> None:
            self.number(x)

    with use_world(VirtualWorld(1)):
        stage = Checking.on(0)()

        @cg.trace
        def step(x: torch.Tensor) -> torch.Tensor:
            stage.check(x)
            return x + 1

        assert torch.equal(step(X), X + 1)
        with pytest.raises(RuntimeError, match="an assertion does not hold"):
            step(X + 1)


def test_the_whole_batch_is_checked() -> None:
    """Each rank has a part of the batch; the assertion is on all of it."""

    @cg.actor
    class Stage(Asserting):
        pass

    with use_world(VirtualWorld(2)):
        stage = Stage.on(cg.mesh(dp=2), plan={"number(x)": cg.cut(0, "dp")})()

        @cg.trace
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = stage.number(x).sum()
            cg.backward(loss)
            return loss

        assert float(step(X)) == 15
        with pytest.raises(RuntimeError, match="an assertion does not hold"):
            step(X + 1)
