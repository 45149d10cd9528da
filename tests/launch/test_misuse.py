"""Public functions where they do not belong, or with what they do not take: refused in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import cg
from cg.backends.virtual import VirtualWorld
from cg.launch.world import use_world

X = torch.ones(2)


@cg.actor
class Scale:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.fixture
def inner() -> Iterator[cg.Step]:
    with use_world(VirtualWorld(2)):
        actor = Scale.on(1)()  # type: ignore[attr-defined]

        @cg.trace
        def inner(x: torch.Tensor) -> torch.Tensor:
            return actor.forward(x)

        yield inner


def test_a_compiled_step_is_not_called_inside_another(inner: cg.Step) -> None:
    compiled = inner.lower(X).compile()
    inner(X)
    for call in (compiled, inner, compiled.record):

        @cg.trace
        def outer(x: torch.Tensor, call: Any = call) -> Any:
            return call(x)

        with pytest.raises(cg.TraceError, match="'inner' is compiled, and called inside") as caught:
            outer(X)
        assert caught.value.loc is not None
        assert caught.value.loc.function == "outer"
        assert caught.value.remedy == "call the plain Python function from the step"
    assert compiled(X).tolist() == [2.0, 2.0]


def test_a_step_is_not_lowered_inside_another(inner: cg.Step) -> None:
    @cg.trace
    def outer(x: torch.Tensor) -> Any:
        return inner.lower(x)

    with pytest.raises(cg.TraceError, match="step inner is traced inside another") as caught:
        outer(X)
    assert caught.value.loc is not None
    assert caught.value.loc.function == "outer"
