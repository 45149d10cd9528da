"""Public functions where they do not belong, or with what they do not take: refused in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

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


WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("trace", lambda step: cg.trace(3), TypeError, "decorates a function over actors, not 3"),
    ("on text", lambda step: cg.on("a"), TypeError, r"cg.on\('a'\): ranks are integers"),
    ("on list", lambda step: cg.on([0, 1]), TypeError, r"cg.on\(\[0, 1\]\): ranks are integers"),
    ("on below", lambda step: cg.on(-1), ValueError, r"cg.on\(-1\): ranks count from 0"),
    ("opaque", lambda step: cg.opaque(3), TypeError, "cg.opaque marks a method, not 3"),
    ("returns", lambda step: cg.opaque(returns="x"), TypeError, "it is the number of results"),
    ("passes", lambda step: step.lower(X).compile(passes=3), TypeError, "passes=3: a string"),
    ("seed", lambda step: step.lower(X).compile(seed="x"), TypeError, "seed='x': an int"),
    ("timeout", lambda step: step.lower(X).compile(timeout="x"), TypeError, "timeout='x' is a str"),
    ("no time", lambda step: step.lower(X).compile(timeout=-1), ValueError, "more than 0"),
    ("phase", lambda step: step.lower(X).as_text("x"), ValueError, "phases are traced, placed, as"),
    ("rank", lambda step: step.lower(X).compile().statistics(9), ValueError, r"they are 0\.\.1"),
    ("builtin", lambda step: cg.trace(max)(X), cg.InputError, "a Python function around it"),
]


@pytest.mark.parametrize(("call", "error", "text"), [case[1:] for case in WRONG])
def test_what_makes_no_sense_is_said_so(
    inner: cg.Step, call: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call(inner)


def test_seeds_of_numpy_are_integers(inner: cg.Step) -> None:
    assert inner.lower(X).compile(seed=np.int64(3))(X).tolist() == [2, 2]


@pytest.mark.parametrize("given", [X, cg.object], ids=["tensor", "object"])
def test_an_async_method_is_not_called(given: Any) -> None:
    @cg.actor
    class Later:
        async def forward(self, x: Any) -> Any:
            return x

    with use_world(VirtualWorld(2)):
        actor = Later.on(1)()  # type: ignore[attr-defined]

        @cg.trace
        def step(x: Any) -> Any:
            return actor.forward(x)

        with pytest.raises(cg.TraceError, match=r"forward is an async method, and nobody") as e:
            step.lower(given)
        assert e.value.loc is not None
        assert e.value.loc.function == "step"
