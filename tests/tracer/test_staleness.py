"""The guard of a trace: what it notices, and what it rightly does not."""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from cg.tracer.values.opaque import opaque

from .function_tools import trace

pytestmark = pytest.mark.timeout(120)

X = torch.ones(2, 3)


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


@dataclass
class Config:
    scale: float = 2.0
    unread: float = 1.0


@dataclass(frozen=True, slots=True)
class Slotted:
    scale: float = 2.0


class Base(abc.ABC):
    @abc.abstractmethod
    def name(self) -> str: ...


class Option(Base):
    def __init__(self) -> None:
        self.flip = False

    def name(self) -> str:
        return "option"


class Registry:
    known: ClassVar[list[str]] = []

    def __init_subclass__(cls) -> None:
        Registry.known.append(cls.__name__)


class Setting(Registry):
    def __init__(self) -> None:
        self.factor = 3


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))])
        self.norm = nn.LayerNorm(3)
        self.bias: Any = nn.Parameter(torch.zeros(3))
        self.register_buffer("table", torch.ones(3))
        self.mode = Mode.FAST
        self.config = Config()
        self.slotted = Slotted()
        self.option = Option()
        self.setting = Setting()
        self.sizes = [1, 2]
        self.names = {"a": 1.0}
        self.tags = {"t"}
        self.array = np.ones(2)
        self.mixed = [torch.ones(3), 2.0]
        self.unread = 0
        self.counter = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.norm(x) * self.config.scale * self.slotted.scale * self.setting.factor
        x = x * self.sizes[0] * self.names["a"] * len(self.tags) * float(self.array[0])
        x = x + self.bias + self.table + self.mixed[0] * self.mixed[1]
        return x.flip(0) if self.mode is Mode.SLOW or self.option.flip else x

    @opaque
    def update(self) -> None:
        self.counter += 1


def replaced(actor: Actor) -> None:
    actor.blocks[0][0] = nn.Linear(3, 3)


def moved(actor: Actor) -> None:
    actor.blocks[0][0].weight.data = torch.ones(3, 3, dtype=torch.float64)


def turned(actor: Actor) -> None:
    actor.blocks[0][0].weight.data = torch.ones(3, 4)[:, :3]


CHANGES: dict[str, tuple[Callable[[Actor], object], str]] = {
    "eval": (
        lambda a: a.eval(),
        "'blocks.0.1.training' was True when it was traced and is False now; set it back",
    ),
    "scalar": (lambda a: setattr(a, "mode", Mode.SLOW), "'mode' was <Mode.FAST: 1>"),
    "config": (lambda a: setattr(a.config, "scale", 3.0), "'config.scale' was 2.0"),
    "new config": (lambda a: setattr(a, "config", Config(3.0)), "'config.scale' was 2.0"),
    "slotted": (lambda a: setattr(a, "slotted", Slotted(3.0)), "'slotted.scale' was 2.0"),
    "abc": (lambda a: setattr(a.option, "flip", True), "'option.flip' was False"),
    "hooked class": (lambda a: setattr(a.setting, "factor", 4), "'setting.factor' was 3"),
    "list": (lambda a: a.sizes.append(3), "'sizes' was [1, 2]"),
    "dict": (lambda a: a.names.update(a=2.0), "'names.a' was 1.0"),
    "set": (lambda a: a.tags.add("u"), "'tags' was {'t'}"),
    "array": (lambda a: a.array.fill(2), "'array'"),
    "mixed": (lambda a: a.mixed.__setitem__(1, 3.0), "'mixed.1' was 2.0"),
    "module": (replaced, "'blocks.0.0' is another object now, Linear"),
    "grown": (lambda a: a.blocks.append(nn.Identity()), "'blocks._modules'"),
    "norm": (lambda a: setattr(a.norm, "eps", 1e-3), "'norm.eps' was 1e-05"),
    "hook": (lambda a: a.norm.register_forward_hook(lambda *_: None), "'norm._forward_hooks'"),
    "lost": (lambda a: delattr(a, "mode"), "has lost the attribute 'mode'"),
    "frozen": (lambda a: a.bias.requires_grad_(False), "requires_grad of 'bias' has changed"),
    "gradient hook": (lambda a: a.bias.register_hook(print), "'bias' has a gradient hook"),
    "dtype": (moved, "of 'blocks.0.0.weight' has changed"),
    "strides": (turned, "of 'blocks.0.0.weight' has changed"),
    "no bias": (lambda a: setattr(a, "bias", None), "'bias' was a tensor when it was traced"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_that_a_trace_relied_on(change: str) -> None:
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
    assert message.startswith("Actor")


@pytest.mark.parametrize(
    "act",
    [
        lambda a: setattr(a, "unread", 1),
        lambda a: setattr(a, "brand_new", 1),
        lambda a: setattr(a.config, "unread", 2.0),
        lambda a: a.update(),
        lambda a: a.load_state_dict(Actor().state_dict()),
        lambda a: a.load_state_dict(Actor().state_dict(), assign=True),
        lambda a: setattr(a.bias, "data", torch.ones(3)),
        lambda a: setattr(a, "table", torch.zeros(3)),
        lambda a: setattr(a.bias, "grad", torch.ones(3)),
        lambda a: setattr(a, "sizes", [1, 2]),
    ],
)
def test_changes_that_do_not_matter(act: Callable[[Actor], object]) -> None:
    actor = Actor()
    guard = trace(actor, "forward", X).guard
    act(actor)
    assert guard is not None
    assert guard() is None


def test_a_layer_norm_does_not_care_about_training() -> None:
    actor = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    guard = trace(actor, "forward", X).guard
    actor.eval()
    assert guard is not None
    assert guard() is None


def test_tied_tensors_that_come_apart() -> None:
    actor = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    actor[1].weight = actor[0].weight
    guard = trace(actor, "forward", X).guard
    assert guard is not None
    assert guard() is None
    actor[1].weight = nn.Parameter(torch.ones(3, 3))
    message = guard()
    assert message is not None
    assert "'0.weight' and '1.weight' were one tensor" in message


def test_everything_counts_where_code_looks_at_all_attributes() -> None:
    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * vars(self)["scale"]

    actor = Actor()
    guard = trace(actor, "forward", X).guard
    actor.scale = 3
    assert guard is not None
    assert "'scale' was 2" in (guard() or "")


def test_watching_registers_no_classes_and_copies_stay_usable() -> None:
    before = list(Registry.known)
    trace(Actor(), "forward", X)
    assert Registry.known == before


def test_no_state_no_guard() -> None:
    class Stateless:
        def double(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    assert trace(Stateless(), "double", X).guard is None
