"""A comparison with an earlier trace that ends early leaves nothing to the trace that follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from . import alike_models as models
from .alike_models import SIZE, LayeredStage
from .test_alike import Build, Tracing

pytestmark = pytest.mark.timeout(300)


class Undoes(nn.Module):
    """A layer that sets something, calls a function, and undoes what it has set."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.function = function
        self.seen: list[Tensor] = []
        self.scale = 1.0


class FillsAList(Undoes):
    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * (1 + len(self.seen))
        self.seen.append(x)
        x = self.function(x)
        self.seen.clear()
        return x


class FillsAListOfItsClass(Undoes):
    all_seen: ClassVar[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * (1 + len(self.all_seen))
        self.all_seen.append(x)
        x = self.function(x)
        self.all_seen.clear()
        return x


class FillsAListOfAnotherModule(Undoes):
    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * (1 + len(models.SEEN))
        models.SEEN.append(x)
        x = self.function(x)
        models.SEEN.clear()
        return x


class SetsAnAttribute(Undoes):
    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * self.scale
        if self.function is not torch.tanh:
            self.scale = 3.0
        x = self.function(x)
        self.scale = 1.0
        return x


class SetsTheDtype(Undoes):
    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * torch.tensor(0.1).double()
        torch.set_default_dtype(torch.float64)
        x = self.function(x).float()
        torch.set_default_dtype(torch.float32)
        return x


class SetsAutocast(Undoes):
    def forward(self, x: Tensor) -> Tensor:
        x = x @ torch.full((SIZE, SIZE), 0.3)
        torch.set_autocast_enabled("cpu", True)
        x = self.function(self.linear(x)).float()
        torch.set_autocast_enabled("cpu", False)
        return x


@pytest.mark.parametrize(
    "kind",
    [
        FillsAList,
        FillsAListOfItsClass,
        FillsAListOfAnotherModule,
        SetsAnAttribute,
        SetsTheDtype,
        SetsAutocast,
    ],
)
def test_a_comparison_that_ends_early_leaves_nothing_behind(kind: type[Undoes]) -> None:
    """In layers of one actor, and in actors of one class."""

    def build(*functions: Callable[[Tensor], Tensor]) -> Build:
        def of_functions() -> LayeredStage:
            torch.manual_seed(0)
            stage = LayeredStage(0)
            stage.layers.extend(kind(function) for function in functions * 2)
            return stage

        return of_functions

    step = Tracing()
    for functions in ((torch.tanh, torch.sin), (torch.tanh, torch.cos), (torch.sin, torch.tanh)):
        step.check(build(*functions))
        step.check(build(*functions), needs_grad=False)
    assert torch.get_default_dtype() is torch.float32
    assert not torch.is_autocast_enabled("cpu")
