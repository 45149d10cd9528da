"""Branches on the type of a module, a parameter or a tensor are those of plain Python."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import cg
from cg.tracer.errors import TraceError
from cg.tracer.method.purity.fake_types import real_kinds
from cg.tracer.values.heap.variables import users_modules

from .function_tools import check_equal, trace

pytestmark = pytest.mark.timeout(120)

X = torch.ones(2, 3)
FACTORS: dict[type, float] = {nn.Linear: 2.0, torch.Tensor: 3.0, nn.Parameter: 5.0}


class Special(nn.Linear):
    pass


class Weight(nn.Parameter):
    pass


class Meta(type):
    pass


class Marking(type):
    """A metaclass that calls the methods of `type` by its name."""

    def __new__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any]) -> Marking:
        made = type.__new__(cls, name, bases, space)
        type.__setattr__(made, "factor", 2)
        return made

    def __init__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any]) -> None:
        type.__init__(cls, name, bases, space)


@cg.actor
class Typed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.special = Special(3, 3)
        self.weight = Weight(torch.ones(3))
        self.register_buffer("buffer", torch.ones(3))
        self.held: Any = [self.linear]

    def module(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if type(self.linear) is nn.Linear else x * 3

    def table(self, x: torch.Tensor) -> torch.Tensor:
        return x * FACTORS[type(self.linear)] * FACTORS.get(type(self.special), 7.0)

    def metaclass(self, x: torch.Tensor) -> torch.Tensor:
        class Marked(metaclass=Marking):
            pass

        return x * type.__getattribute__(Marked, "factor") if isinstance(Marking, type) else x

    def class_attribute(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.special.__class__ is Special else x * 3

    def walks(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x) if type(layer) in (nn.Linear,) else x + 1
        return x

    def itself(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if type(self) is Typed else x * 3

    def tensor(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if type(x) is torch.Tensor else x * 3

    def derived(self, x: torch.Tensor) -> torch.Tensor:
        return x * FACTORS[type(torch.relu(x) + 1)]

    def state(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2 if type(self.buffer) is torch.Tensor else x * 3
        return x * FACTORS[type(self.linear.weight)]

    def parameter(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight if type(self.weight) is Weight else x

    def other_uses(self, x: torch.Tensor) -> torch.Tensor:
        """Other uses of the name."""
        made = type("Made", (Meta,), {})
        good = type(made) is type and isinstance(Typed, type) and not isinstance(x, type)
        good = good and issubclass(Meta, type) and isinstance(None, type | None)
        good = good and type(type(self)) is type and type.__name__ == "type"

        class Inner(type):
            pass

        good = good and issubclass(Inner, type) and {type: True}[type] and type in (type, 1)
        return x * 2 if good else x * 3


METHODS = [n for n in vars(Typed) if n[0] != "_" and n != "on"]


@pytest.mark.parametrize("method", METHODS)
def test_the_branch_of_plain_python(method: str) -> None:
    check_equal(Typed(), method, X.clone().requires_grad_())
    assert "type" not in globals()


def test_an_instance_of_a_class_with_a_registry_and_a_metaclass() -> None:
    class Checked(type):
        def __setattr__(cls, name: str, value: object) -> None:
            raise AssertionError("nobody sets attributes of this class")

    class Inner(metaclass=Checked):
        def __init__(self) -> None:
            self.scale = 2.0

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.inner.scale if type(self.inner) is Inner else x

    actor = Outer()
    traced = trace(actor, "forward", X)
    assert torch.equal(traced.body(X)[0], X * 2)
    assert traced.guard is not None
    actor.inner.scale = 3.0
    assert "'inner.scale' was 2.0" in (traced.guard() or "")


def test_classes_and_names_are_as_before_after_an_error() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    before = dict(vars(Fails)), dict(vars(nn.Module))
    with pytest.raises(TraceError):
        trace(Fails(), "forward", X)
    assert dict(vars(Fails)) == before[0]
    assert dict(vars(nn.Module)) == before[1]
    assert "type" not in globals()


def test_modules_of_the_user_are_found_whenever_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):  # a new one, then another in its place
        module = ModuleType("late")
        module.__file__ = __file__
        monkeypatch.setitem(sys.modules, "late", module)
        with real_kinds({}, map(vars, users_modules())):
            assert "type" in vars(module)
        assert "type" not in vars(module)
