"""Names by which a step reaches actors, given others after its first call."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

X = torch.tensor([1.0, 2.0])


@cg.actor
class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Model:
    """An object whose attributes are actors, and whose method is a step."""

    def __init__(self, *factors: float) -> None:
        self.stages = row(*factors)

    @cg.trace
    def step(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage.forward(x)
        return x


def row(*factors: float) -> list[Any]:
    return [Times.on(rank)(factor) for rank, factor in enumerate(factors)]


stages: Any = None
"""What a step of this module reads: the global variable of a notebook."""


@pytest.fixture(autouse=True)
def a_world_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with use_world(VirtualWorld(2)):
        monkeypatch.setitem(globals(), "stages", row(2.0, 3.0))
        yield


def run() -> Callable[[Tensor], Tensor]:
    @cg.trace
    def step(x: Tensor) -> Tensor:
        found = [x := stage.forward(x) for stage in stages]
        return found[-1]

    return step


def equal(step: Any, x: Tensor = X) -> None:
    assert torch.equal(step(x), step.__wrapped__(x))


def test_a_global_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    step = run()
    equal(step)
    for other in (row(5.0, 7.0), tuple(row(2.0)), row(3.0, 4.0)[::-1]):
        monkeypatch.setitem(globals(), "stages", other)
        equal(step)
        assert repr(step) == "<cg.Step step: compiled for 1 signature>"


@pytest.mark.parametrize("held", [list, lambda actors: dict(enumerate(actors))])
def test_a_container_that_changes_in_place(held: Callable[[list[Any]], Any]) -> None:
    actors = held(row(2.0, 3.0))

    @cg.trace
    def step(x: Tensor) -> Tensor:
        for index in range(len(actors)):
            x = actors[index].forward(x)
        return x

    equal(step)
    actors[1] = Times.on(0)(9.0)
    equal(step)
    del actors[1]
    equal(step)


def test_actors_among_other_things_in_containers_in_objects() -> None:
    inner = SimpleNamespace(made={"rate": 0.1, "stages": [row(2.0), row(3.0)]})
    outer = SimpleNamespace(inner=inner)

    @cg.trace
    def step(x: Tensor) -> Tensor:
        for (stage,) in outer.inner.made["stages"]:
            x = stage.forward(x)
        return x

    equal(step)
    inner.made["stages"][1][0] = Times.on(1)(7.0)
    equal(step)
    outer.inner = SimpleNamespace(made={"stages": [row(9.0)]})
    equal(step)
    inner.made["rate"] = 0.2  # of what is no longer reached
    equal(step)


def test_a_variable_of_the_function_around() -> None:
    stage = Times.on(1)(2.0)

    @cg.trace
    def step(x: Tensor) -> Tensor:
        return stage.forward(x)

    equal(step)
    stage = Times.on(0)(7.0)
    equal(step)


def test_attributes_of_the_step_s_object_and_of_others() -> None:
    one, two = Model(2.0, 3.0), Model(5.0)

    @cg.trace
    def step(x: Tensor) -> Tensor:
        return [stage.forward(x) for stage in two.stages][-1]

    assert one.step(X).tolist() == [6.0, 12.0]
    equal(step)
    one.stages, two.stages = two.stages, one.stages
    assert one.step(X).tolist() == [5.0, 10.0]
    equal(step)
    two = Model(8.0)
    equal(step)


def test_each_signature_follows() -> None:
    step = run()
    equal(step)
    equal(step, X[:1])
    stages[0] = Times.on(0)(11.0)
    equal(step, X[:1])
    equal(step)


def test_what_holds_the_same_actors_is_not_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    step = run()
    step(X)
    (compiled,) = step._compiled.values()
    monkeypatch.setitem(globals(), "stages", list(stages))
    monkeypatch.setitem(globals(), "X", X * 2)
    step(X)
    assert list(step._compiled.values()) == [compiled]


def test_actors_that_no_name_holds_any_more_are_freed() -> None:
    step = run()
    equal(step)
    old = weakref.ref(stages[0])
    stages[0] = Times.on(0)(4.0)
    equal(step)
    gc.collect()
    assert old() is None


def test_what_lower_has_compiled_keeps_its_actors() -> None:
    compiled = run().lower(X).compile()
    before = compiled(X)
    stages[0] = Times.on(0)(4.0)
    assert torch.equal(compiled(X), before)
