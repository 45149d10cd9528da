"""Changes between executions that a guard must see: absence, types, holders, classes, hooks."""

from __future__ import annotations

import argparse
import collections
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import cg
from cg.tracer.errors import TraceError

from .function_tools import trace

pytestmark = pytest.mark.timeout(120)

X = torch.ones(2, 3)


@dataclass(slots=True)
class Slotted:
    scale: float = 2.0


class Option:
    flip = False


class Other(Option):
    flip = True


class Layer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Scale:
    def __init__(self) -> None:
        self.factor = 2.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Settings:
    """Settings as attributes of a class, of which nobody makes an object."""

    scale = 1.0


def times(x: torch.Tensor, factors: list[float], sign: float = 1.0) -> torch.Tensor:
    return x * factors[0] * sign


class Actor(nn.Module):
    table: ClassVar[dict[str, float]] = {"a": 1.0}
    known: ClassVar[list[dict[str, int]]] = [{"k": 1}]

    def __init__(self) -> None:
        super().__init__()
        self.args = argparse.Namespace(scale=2.0)
        self.slotted = Slotted()
        self.user = collections.UserDict({"a": 1.0})
        self.inner = ({"a": 1.0}, [1, 2])
        self.number: Any = 2
        self.flag: Any = True
        self.array = np.ones(100_000)
        self.long = list(range(20_000))
        self.option = Option()
        self.layer = Layer()
        self.bare = Layer()
        self.linear = nn.Linear(3, 3)
        self.listed = [torch.ones(3)]
        self.named = {"t": torch.ones(3)}
        self.paired: Any = (torch.ones(3), 1.0)
        self.bound = Scale().__call__
        self.partial = functools.partial(times, factors=[2.0])
        self.settings = Settings
        self.chained = collections.ChainMap({"a": 1.0})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.args.scale * self.slotted.scale * self.user["a"]
        x = x * self.inner[0]["a"] * self.inner[1][0] * self.number * self.flag
        x = x * float(self.array[-1]) + self.long[-1] + self.table["a"] + self.known[0]["k"]
        if hasattr(self.linear, "lora"):
            x = x + self.linear.lora(x)
        x = x + getattr(self, "bonus", 0)
        x = self.bare(self.linear(self.layer(x)))
        x = x + self.listed[0] + self.named["t"] + self.paired[0] * self.paired[1]
        x = self.partial(self.bound(x)) * self.settings.scale * self.chained["a"]
        return x.flip(0) if self.option.flip else x


def patched(actor: Actor) -> None:
    actor.layer.forward = lambda x: x  # type: ignore[method-assign]


CHANGES: dict[str, tuple[Callable[[Actor], object], str]] = {
    "namespace": (lambda a: setattr(a.args, "scale", 3.0), "'args.scale' was 2.0"),
    "slotted dataclass": (lambda a: setattr(a.slotted, "scale", 3.0), "'slotted.scale' was 2.0"),
    "UserDict": (lambda a: a.user.update(a=3.0), "'user.data.a' was 1.0"),
    "dict in a tuple": (lambda a: a.inner[0].update(a=3.0), "'inner.0.a' was 1.0"),
    "list in a tuple": (lambda a: a.inner[1].append(3), "'inner.1' was [1, 2]"),
    "int to float": (lambda a: setattr(a, "number", 2.0), "'number' was 2 when"),
    "bool to int": (lambda a: setattr(a, "flag", 1), "'flag' was True when"),
    "large array": (lambda a: a.array.__setitem__(-1, 3.0), "'array'"),
    "large list": (lambda a: a.long.__setitem__(-1, 3), "'long.19999' was 19999"),
    "class of an object": (
        lambda a: setattr(a.option, "__class__", Other),
        "'option' was of class Option when it was traced and is of class Other",
    ),
    "class of the actor": (
        lambda a: setattr(a, "__class__", type("Tuned", (type(a),), {})),
        ": it was of class Actor when it was traced and is of class Tuned",
    ),
    "patched forward": (patched, "'layer.forward' was <function Layer.forward"),
    "its own forward": (lambda a: setattr(a, "forward", torch.relu), "'forward' was <function"),
    "attribute of an object": (lambda a: setattr(a, "bonus", 3), "'bonus' was not there"),
    "submodule": (
        lambda a: setattr(a.linear, "lora", nn.Linear(3, 3)),
        "'linear.lora' was not there",
    ),
    "list of tensors": (
        lambda a: setattr(a, "listed", [torch.zeros(3)]),
        "'listed' was one list of tensors when it was traced and is another one",
    ),
    "dict of tensors": (
        lambda a: setattr(a, "named", {"t": torch.zeros(3)}),
        "'named' was one dict of tensors when it was traced and is another one",
    ),
    "object of a bound method": (
        lambda a: setattr(a.bound.__self__, "factor", 3.0),
        "'bound.__self__.factor' was 2.0",
    ),
    "bound method of another object": (
        lambda a: (setattr(a, "bound", Scale().__call__), setattr(a.bound.__self__, "factor", 3.0)),
        "'bound.__self__.factor' was 2.0",
    ),
    "argument of a partial function": (
        lambda a: a.partial.keywords["factors"].__setitem__(0, 3.0),
        "'partial.keywords.factors.0' was 2.0",
    ),
    "further argument of a partial function": (
        lambda a: a.partial.keywords.update(sign=-1.0),
        "'partial.keywords' was {'factors': [2.0]}",
    ),
    "other partial function": (
        lambda a: setattr(a, "partial", functools.partial(torch.mul, other=2.0)),
        "'partial.func' was <function times",
    ),
    "class of other settings": (
        lambda a: setattr(a, "settings", type("Settings", (), {"scale": 2.0})),
        "'settings' is another object now",
    ),
    "ChainMap": (lambda a: a.chained.maps[0].update(a=2.0), "'chained.maps.0.a' was 1.0"),
    "None for a tensor": (lambda a: a.listed.__setitem__(0, None), "'listed.0' was a tensor"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    actor = Actor()
    guard = trace(actor, "forward", X).guard
    assert guard is not None
    assert guard() is None
    act, says = CHANGES[change]
    act(actor)
    message = guard()
    assert message is not None
    assert says in message
    assert "trace the step again" in message


def test_settings_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = trace(Actor(), "forward", X).guard
    assert guard is not None
    monkeypatch.setattr(Settings, "scale", 2.0)
    assert "'Settings.scale' was 1.0 when it was traced and is 2.0 now" in (guard() or "")


def test_dicts_and_lists_of_the_class() -> None:
    for change, undo, says in (
        (lambda: Actor.table.update(a=2.0), lambda: Actor.table.update(a=1.0), "'table.a' was 1.0"),
        (lambda: Actor.known[0].update(k=2), lambda: Actor.known[0].update(k=1), "'known.0.k' was"),
    ):
        guard = trace(Actor(), "forward", X).guard
        assert guard is not None
        change()
        try:
            assert says in (guard() or "")
        finally:
            undo()
        assert guard() is None


def test_a_method_of_a_class_that_is_replaced() -> None:
    guard = trace(Actor(), "forward", X).guard
    assert guard is not None
    before = Layer.forward
    Layer.forward = lambda self, x: x  # type: ignore[method-assign]
    try:
        assert "'Layer.forward' was <function" in (guard() or "")
    finally:
        Layer.forward = before  # type: ignore[method-assign]
    assert guard() is None


def test_a_trace_of_torch_fx_in_another_thread() -> None:
    """It wraps `Module.__call__` while it goes on, in which nothing differs; other wrappers do."""
    guard = trace(Actor(), "forward", X).guard
    assert guard is not None
    has_begun, may_end, before = threading.Event(), threading.Event(), nn.Module.__call__

    def held(x: torch.Tensor) -> torch.Tensor:
        has_begun.set()
        assert may_end.wait(60)
        return x + 1

    thread = threading.Thread(target=lambda: make_fx(held)(torch.zeros(1)))
    thread.start()
    try:
        assert has_begun.wait(60)
        assert nn.Module.__call__ is not before
        assert guard() is None
    finally:
        may_end.set()
        thread.join()
    assert nn.Module.__call__ is before
    assert guard() is None
    nn.Module.__call__ = functools.wraps(before)(lambda *given: before(*given))  # type: ignore
    try:
        assert "'__call__' was <function" in (guard() or "")
    finally:
        nn.Module.__call__ = before  # type: ignore[method-assign]


def test_hooks_of_all_modules() -> None:
    guard = trace(Actor(), "forward", X).guard
    assert guard is not None
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert "_global_forward_hooks" in (guard() or "")
    finally:
        handle.remove()
    assert guard() is None


@pytest.mark.parametrize(
    "act",
    [
        lambda a: setattr(a, "paired", (torch.zeros(3), 1.0)),
        lambda a: setattr(a, "args", argparse.Namespace(scale=2.0, unread=1)),
        lambda a: setattr(a, "option", Option()),
        lambda a: setattr(a, "slotted", Slotted()),
        lambda a: setattr(a, "layer", Layer()),
        lambda a: setattr(a, "long", list(range(20_000))),
        lambda a: setattr(a, "inner", ({"a": 1.0}, [1, 2])),
        lambda a: setattr(a, "array", np.ones(100_000)),
        lambda a: setattr(a, "table", {"a": 1.0}) or delattr(a, "table"),
        lambda a: setattr(a.linear, "unread", 1),
        lambda a: setattr(a, "bound", Scale().__call__),
        lambda a: setattr(a, "partial", functools.partial(times, factors=[2.0])),
    ],
)
def test_equal_values_are_no_change_and_are_followed(act: Callable[[Actor], object]) -> None:
    actor = Actor()
    guard = trace(actor, "forward", X).guard
    assert guard is not None
    act(actor)
    assert guard() is None
    actor.args.scale = 3.0
    assert "'args.scale' was 2.0" in (guard() or "")
    actor.args.scale = 2.0
    assert guard() is None
    actor.slotted.scale = 4.0
    assert "'slotted.scale' was 2.0" in (guard() or "")


class Counter(Scale):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.factor += 1
        return x * self.factor


def test_a_callable_with_state_as_an_argument() -> None:
    actor, scale = Holder.on(0)(), Scale()

    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        return actor.apply(x, scale)

    assert torch.equal(step(X), X * 2)
    scale.factor = 3.0
    with pytest.raises(RuntimeError, match=r"'argument 1.factor' was 2.0 when it was traced and"):
        step(X)
    with pytest.raises(TraceError, match=r"changes the attribute 'argument 1.factor'"):
        trace(Holder.on(0)().local, "apply", X, Counter())


class Counting:
    """Counts its calls, by a method that an actor holds."""

    def __init__(self) -> None:
        self.calls = 0

    def count(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


def test_a_write_behind_a_bound_method_is_refused() -> None:
    holder = Holder.on(0)().local
    holder.counting = Counting().count
    with pytest.raises(TraceError, match=r"changes the attribute 'counting.__self__.calls'"):
        trace(holder, "counted", X)


@cg.actor
class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [torch.ones(3)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.parts[0]

    def apply(self, x: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return fn(x * self.parts[0])

    def counted(self, x: torch.Tensor) -> torch.Tensor:
        return self.counting(x)  # type: ignore[operator, return-value]

    @cg.opaque
    def renew(self) -> None:
        self.parts = [self.parts[0] * 2]


def test_an_opaque_method_that_replaces_a_list_of_tensors() -> None:
    actor = Holder.on(0)()

    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        actor.renew()
        return actor.forward(x)

    with pytest.raises(cg.RemoteError, match=r"'parts' was one list of tensors"):
        step(X)


def test_a_list_of_tensors_that_is_replaced_between_executions() -> None:
    actor = Holder.on(0)()

    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        return actor.forward(x)

    assert torch.equal(step(X), X)
    actor.local.parts = [torch.full((3,), 2.0)]
    with pytest.raises(RuntimeError, match=r"'parts' was one list of tensors"):
        step(X)
