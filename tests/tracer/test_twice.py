"""Hidden state in methods is refused; what happens in a first call only is accepted."""

from __future__ import annotations

import collections
import functools
import pickle
import random
import time
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import cg
from cg.tracer.errors import TraceError
from cg.tracer.method.purity.side_effects import SideEffects
from cg.tracer.values.heap.snapshot import Snapshot

from . import hidden
from .function_tools import check_equal, trace

pytestmark = pytest.mark.timeout(120)

X = torch.ones(2, 3)
RANDOM = random.Random(0)
ITERATOR = iter(range(1, 1000))
GENERATOR = (i for i in range(1, 1000))
NESTED: dict[str, Any] = {"a": {"b": {"count": 0}}}
DEQUE: collections.deque[int] = collections.deque([1])
POOL = collections.deque(range(10))


class Elsewhere:
    total = 0


class Meter:
    inner: ClassVar[dict[str, list[int]]] = {"seen": [0]}


def counted() -> int:
    counted.calls = getattr(counted, "calls", 0) + 1  # type: ignore[attr-defined]
    return counted.calls  # type: ignore[attr-defined,no-any-return]


def make_helper() -> Any:
    state = {"n": [0]}

    def helper() -> int:
        state["n"][0] += 1
        return state["n"][0]

    return lambda: helper()


HELPER = make_helper()


@cg.actor
class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def random_object(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * RANDOM.random()

    def iterator(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * next(ITERATOR)

    def generator(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * next(GENERATOR)

    def nested_dict(self, x: torch.Tensor) -> torch.Tensor:
        NESTED["a"]["b"]["count"] += 1
        return self.linear(x) * NESTED["a"]["b"]["count"]

    def deque(self, x: torch.Tensor) -> torch.Tensor:
        DEQUE.append(1)
        return self.linear(x) * len(DEQUE)

    def rotates(self, x: torch.Tensor) -> torch.Tensor:
        POOL.rotate(1)
        return self.linear(x) * POOL[0]

    def other_class(self, x: torch.Tensor) -> torch.Tensor:
        Elsewhere.total += 1
        return self.linear(x) * Elsewhere.total

    def deep_in_a_class(self, x: torch.Tensor) -> torch.Tensor:
        Meter.inner["seen"][0] += 1
        return self.linear(x) * Meter.inner["seen"][0]

    def function_attribute(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * counted()

    def closure_of_a_helper(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * HELPER()

    def other_module(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * hidden.bump()

    def clock(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (time.perf_counter_ns() % 1_000_003)

    def constant_of_the_clock(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * torch.tensor([time.perf_counter_ns()] * 3)

    def number_of_operators(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(next(ITERATOR)):
            x = self.linear(x)
        return x

    def returned_number(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.linear(x), next(ITERATOR)

    def which_state(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.linear.bias if next(ITERATOR) % 2 else self.linear.weight[0])


METHODS = [name for name in vars(Hidden) if name[0] != "_" and name != "on"]
NAMED = {
    "nested_dict": "NESTED.a.b.count",
    "deque": "DEQUE",
    "rotates": "POOL",
    "other_class": "Elsewhere.total",
    "deep_in_a_class": "Meter.inner.seen.0",
}
"""State in objects that the method's code names is found under that name."""


@pytest.mark.parametrize("method", METHODS)
def test_hidden_state_is_refused(method: str) -> None:
    actor = Hidden.on(0)()

    @cg.trace
    def step(x: torch.Tensor) -> Any:
        return getattr(actor, method)(x)

    with pytest.raises(TraceError) as caught:
        step(X)
    error = caught.value
    reason = f"it changes '{NAMED[method]}'" if method in NAMED else "run twice, it does not do the"
    assert reason in error.reason
    assert error.loc is not None
    assert error.loc.function == method
    assert "@cg.opaque" in error.remedy
    assert type(actor.local.linear.weight) is nn.Parameter


def test_the_error_says_what_differs() -> None:
    with pytest.raises(TraceError, match=r"aten\.mul\.Tensor\(%\d+, \d+\) at first, and aten\.mul"):
        trace(Hidden(), "iterator", X)


def test_the_error_reaches_other_ranks() -> None:
    with pytest.raises(TraceError) as caught:
        trace(Hidden(), "iterator", X)
    told = pickle.loads(pickle.dumps(caught.value))
    assert type(told) is TraceError
    assert str(told) == str(caught.value)


def test_an_exception_the_second_time() -> None:
    state = iter([1, 0])

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (1 // next(state))

    with pytest.raises(TraceError, match="works at first, but not the second time: it raised"):
        trace(Fails(), "forward", X)


class Config:
    problem: str | None = None

    def __init__(self) -> None:
        self.problem_type: str | None = None


class Lazy(nn.Module):
    """Does some things in the first call only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.config = Config()
        self.sizes: dict[str, int] = {}
        self.armed = False

    @functools.cached_property
    def factor(self) -> float:
        return 2.0 * self.linear.in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.config.problem_type is None:
            self.config.problem_type = "regression"
        if not hasattr(self, "handle"):
            self.handle = self.linear.register_forward_hook(lambda module, args, out: out * 2)
        if "n" not in self.sizes:
            self.sizes["n"] = x.shape[0]
        y = self.linear(x) * self.factor * self.sizes["n"]
        return y if self.config.problem_type == "regression" else -y

    def arms(self, x: torch.Tensor) -> torch.Tensor:
        self.armed = True
        return self.linear(x)

    def toggles(self, x: torch.Tensor) -> torch.Tensor:
        self.armed = not self.armed
        return self.linear(x)

    def differs_then(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * (2 if self.armed else 1)
        self.armed = True
        return y

    def keeps(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mask"):
            self.mask = torch.ones(3).flip(0)
        return self.linear(x) * self.mask


def test_what_a_first_call_makes_is_accepted_and_kept() -> None:
    check_equal(Lazy(), "forward", X.clone().requires_grad_())
    actor = Lazy()
    traced = trace(actor, "forward", X)
    assert actor.config.problem_type == "regression"
    assert actor.sizes == {"n": 2}
    assert vars(actor)["factor"] == 6.0
    assert torch.equal(traced.body(X)[0], actor(X))
    assert traced.guard is not None
    assert traced.guard() is None
    actor.config.problem_type = None
    assert "'config.problem_type' was 'regression'" in (traced.guard() or "")


def test_a_flag_that_a_method_sets_is_guarded() -> None:
    """Otherwise the method would not set it again."""
    actor = Lazy()
    guard = trace(actor, "arms", X).guard
    assert guard is not None
    assert actor.armed
    assert guard() is None
    actor.armed = False
    assert "'armed' was True" in (guard() or "")


@pytest.mark.parametrize("method", ["toggles", "differs_then"])
def test_a_change_with_consequences_is_refused(method: str) -> None:
    actor = Lazy()
    with pytest.raises(TraceError, match=r"changes the attribute 'armed' \(from False to True\)"):
        trace(actor, method, X)
    assert actor.armed is False
    assert type(actor.linear.weight) is nn.Parameter


def test_a_tensor_that_is_kept_asks_for_an_eager_call() -> None:
    with pytest.raises(TraceError, match=r"traced value in the attribute .mask.") as caught:
        trace(Lazy(), "keeps", X)
    assert caught.value.remedy.startswith("return the value, for the step to hand on")
    assert "call the method once eagerly, on actor.local" in caught.value.remedy
    actor = Lazy()
    actor.keeps(X)
    check_equal(actor, "keeps", X)


def test_a_tensor_that_is_put_back_is_no_change() -> None:
    """As the remedy says, where later calls do not need what was kept."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.state: torch.Tensor | None = None

        def holds(self, x: torch.Tensor) -> torch.Tensor:
            self.state = self.linear(x)
            return self.state + 1

        def drops(self, x: torch.Tensor) -> torch.Tensor:
            result = self.holds(x)
            self.state = None
            return result

    with pytest.raises(TraceError) as caught:
        trace(Dropping(), "holds", X)
    assert "put back what was there, before the method returns" in caught.value.remedy
    check_equal(Dropping(), "drops", X.clone().requires_grad_())


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_weights_come_back_whatever_happens(kind: type[BaseException]) -> None:
    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.parts = [torch.ones(3)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.linear(x)
            raise kind

    actor = Interrupted()
    held = [actor.linear.weight, actor.linear.bias, actor.parts[0]]
    with pytest.raises((kind, TraceError)):
        trace(actor, "forward", X)
    now = [actor.linear.weight, actor.linear.bias, actor.parts[0]]
    assert all(a is b for a, b in zip(now, held, strict=True))
    assert "__getattribute__" not in vars(Interrupted)
    assert "__getattribute__" not in vars(nn.Linear)


def test_weights_come_back_where_the_restoring_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    restore, undo, raised = Snapshot.restore, SideEffects.undo, []

    def interrupted(self: Any) -> None:
        if not raised:
            raised.append(1)
            raise KeyboardInterrupt
        restore(self)

    def fails(self: Any) -> None:
        undo(self)
        raise RuntimeError("undo")

    monkeypatch.setattr(Snapshot, "restore", interrupted)
    monkeypatch.setattr(SideEffects, "undo", fails)
    actor = nn.Linear(3, 3)
    weight = actor.weight
    with pytest.raises((KeyboardInterrupt, TraceError)):
        trace(actor, "forward", X)
    assert actor.weight is weight


class Seeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forks(self, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return self.linear(x) + torch.rand(3)

    def only_forks(self, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng():
            return self.linear(x) + torch.rand(3)

    def puts_back(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.get_rng_state()
        x = x + torch.rand(3)
        torch.set_rng_state(state)
        return self.linear(x)


@pytest.mark.parametrize("method", ["forks", "only_forks", "puts_back"])
def test_seeds_that_leave_no_trace(method: str) -> None:
    with pytest.raises(TraceError, match="seeds or sets torch's global generator") as caught:
        trace(Seeds(), method, X)
    assert caught.value.loc is not None
    assert caught.value.loc.function == method
    assert torch.random.default_generator is torch.default_generator
