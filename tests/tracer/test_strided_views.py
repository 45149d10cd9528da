"""`as_strided` with an offset, which counts from the beginning of a tensor's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from cg.tracer.errors import TraceError

from .function_tools import check_equal, trace

X = torch.arange(24.0).reshape(4, 6)

VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "from the beginning": lambda y: y.as_strided((2, 3), (6, 1), 0),
    "from another element": lambda y: y.as_strided((2, 3), (6, 2), 7),
    "of a view": lambda y: y[1:].as_strided((2, 3), (6, 2), 9),
    "as the view begins": lambda y: y[2:].as_strided((2, 3), (1, 4), 12),
    "overlapping": lambda y: y.as_strided((5, 4), (2, 1), 3),
    "of nothing": lambda y: y.as_strided((0, 4), (2, 1), 3).sum() + y,
}


class Layer(nn.Module):
    def __init__(self, call: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.scale, self.call = nn.Parameter(torch.full((6,), 3.0)), call

    def forward(self, x: Tensor) -> Any:
        return self.call(x * self.scale)

    def of_input(self, x: Tensor) -> Tensor:
        return x.as_strided((2, 3), (6, 1), 0) * 2

    def of_state(self, x: Tensor) -> Tensor:
        return self.scale.as_strided((2, 2), (2, 1), 1) + x[:2, :2]

    def reaches_back(self, x: Tensor) -> Tensor:
        return (x * 2)[1:].as_strided((2, 3), (6, 1), 0)

    def scatters(self, x: Tensor) -> Tensor:
        return (x * 2).as_strided_scatter(x[:2, :2] * 3, (2, 2), (6, 1), 1)

    def asks(self, x: Tensor) -> Tensor:
        return x.flatten()[x.storage_offset() :]


@pytest.mark.parametrize("name", VIEWS)
def test_results_are_those_of_plain_python(name: str) -> None:
    check_equal(Layer(VIEWS[name]), "forward", X)


@pytest.mark.parametrize("name", VIEWS)
def test_compiled_results_are_those_of_plain_python(name: str) -> None:
    @cg.trace
    def step(x: Tensor) -> Any:
        return layer.forward(x)

    whole = torch.cat([torch.ones(1, 6), X])
    with use_world(VirtualWorld(1)):
        layer = cg.actor(Layer).on(0)(VIEWS[name])
        compiled = step.lower(X).compile(fuse="inductor")
        for x in (X, whole[1:]):  # the second one lies further behind in its memory
            assert torch.equal(compiled(x), Layer(VIEWS[name])(x))


@pytest.mark.parametrize("name", ["of_input", "of_state", "reaches_back", "scatters", "asks"])
def test_what_depends_on_the_place_in_memory_is_refused(name: str) -> None:
    with pytest.raises(TraceError, match="memory") as caught:
        trace(Layer(VIEWS["overlapping"]), name, X)
    assert "test_strided_views.py" in str(caught.value)
    assert "as_strided" in str(caught.value)
