"""Actor classes, handles, and what may be done with them outside of a step."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from cg.tracer.errors import TraceError
from cg.tracer.record.actors.actors import ActorError, ActorHandle
from cg.tracer.record.actors.factory import ActorFactory

from .step_tools import Bench, Solo, refusal


class OneOf(Solo):
    """A world of two of which this process plays rank 1."""

    rank = 1

    def plays(self, rank: int) -> bool:
        return rank == 1


class Counter:
    """Counts."""

    kind = "counter"

    def __init__(self, start: int = 0, *, step: int = 1) -> None:
        self.value = start
        self.step = step

    def add(self, n: int) -> int:
        self.value += n * self.step
        return self.value

    @property
    def twice(self) -> int:
        return 2 * self.value

    def _hidden(self) -> int:
        return self.value


@pytest.fixture
def factory() -> ActorFactory:
    return ActorFactory(lambda: OneOf(2))


def decorated(factory: ActorFactory) -> Any:
    return factory(type("Counter", (Counter,), {"__doc__": Counter.__doc__}))


def test_the_class_stays_what_it_was(factory: ActorFactory) -> None:
    cls = decorated(factory)
    plain = cls(3)
    assert isinstance(plain, cls)
    assert isinstance(plain, Counter)
    assert plain.add(2) == 5
    assert cls.__doc__ == "Counts."
    assert isinstance(cls, type)

    class Child(cls):  # type: ignore[misc]
        def add(self, n: int) -> int:
            return int(super().add(n)) * 10

    assert Child(1).add(1) == 20
    child = Child.on(1)(1)
    assert child.name == "child0"
    assert child.cls is Child
    assert child.add(1) == 20
    assert factory(Child) is Child


def test_instances_exist_on_their_rank_only(factory: ActorFactory) -> None:
    made = []

    @factory
    class Noted:
        def __init__(self, value: int) -> None:
            made.append(value)

    here, there = Noted.on(1)(10), Noted.on(0)(20)  # type: ignore[attr-defined]
    assert made == [10]
    assert here.is_local
    assert not there.is_local
    assert isinstance(here.local, Noted)
    with pytest.raises(ActorError, match=r"noted1 lives on rank 0, this is rank 1; ask for noted1"):
        _ = there.local


def test_names_are_numbered_and_never_equal(factory: ActorFactory) -> None:
    def made(name: str) -> str:
        handle: ActorHandle = factory(type(name, (), {})).on(1)()  # type: ignore[attr-defined]
        return handle.name

    assert [made("Stage") for _ in range(3)] == ["stage0", "stage1", "stage2"]
    assert made("Stage1") == "stage10"
    assert [made("Stage") for _ in range(7)] == [f"stage{i}" for i in range(3, 10)]
    assert made("Stage") == "stage11"


def test_outside_of_a_step_local_calls_are_plain_python(factory: ActorFactory) -> None:
    cls = decorated(factory)
    here, there = cls.on(1)(5, step=2), cls.on(0)()
    assert here.add(3) == 11
    assert here.add(n=1) == 13
    assert here._hidden() == 13
    assert here.local.twice == 26
    message = (
        r"counter1.add was called outside of a step, but counter1 lives on rank 0 and this is rank "
        r"1; call it in a step \(@cg.trace\), or only where counter1.is_local"
    )
    with pytest.raises(ActorError, match=message):
        there.add(1)


def test_attributes_that_are_not_methods(factory: ActorFactory) -> None:
    here = decorated(factory).on(1)()
    with pytest.raises(AttributeError) as info:
        _ = here.value
    assert str(info.value) == (
        "no method 'value' in the actor counter0; the methods of Counter are: add. Attributes live "
        "with the instance: read them in a method, or, outside of steps and on rank 1, from "
        "counter0.local"
    )
    for name in ("twice", "kind"):
        with pytest.raises(AttributeError, match=f"'{name}' is not a method of the actor counter0"):
            getattr(here, name)
    assert not hasattr(here, "value")
    with pytest.raises(TypeError, match="counter0 cannot be called, Counter has no __call__"):
        here(1)


def test_modules_list_their_own_methods(factory: ActorFactory) -> None:
    class TwoMethods(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x

        def loss(self, x: Any) -> Any:
            return x

    stage = factory(TwoMethods).on(1)()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="the methods of TwoMethods are: forward, loss"):
        _ = stage.weight
    assert stage.state_dict() == {}
    assert torch.equal(stage(torch.ones(2)), torch.ones(2))


def test_ranks_that_the_world_lacks(factory: ActorFactory) -> None:
    cls = decorated(factory)
    for rank in (2, -1, True, "0"):
        with pytest.raises(ActorError, match=r"Counter.on\(.*\): the world has ranks 0..1; start"):
            cls.on(rank)
    with pytest.raises(ActorError, match=r"Counter.on\(i % cg.world_size\(\)\)"):
        cls.on(7)


def test_what_cannot_be_an_actor_class(factory: ActorFactory) -> None:
    with pytest.raises(TypeError, match=r"cg.actor decorates classes, not <function"):
        factory(lambda: None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"class Lamp has an attribute 'on', which cg.actor would"):
        factory(type("Lamp", (), {"on": True}))
    ranked = factory(type("Ranked", (), {"rank": lambda self: 3}))
    with pytest.raises(ActorError, match="method 'rank' of Ranked would be hidden by the handle"):
        ranked.on(1)  # type: ignore[attr-defined]


def test_constructors_raise_as_they_are(factory: ActorFactory) -> None:
    class Broken:
        def __init__(self) -> None:
            raise KeyError("weights")

    with pytest.raises(KeyError, match="weights"):
        factory(Broken).on(1)()  # type: ignore[attr-defined]


def test_handles_compare_by_identity_and_stay_in_their_process(factory: ActorFactory) -> None:
    cls = decorated(factory)
    a, b = cls.on(1)(), cls.on(1)()
    assert a == a
    assert a != b
    assert len({a, b}) == 2
    assert a.add is a.add
    assert copy.copy(a) is a
    with pytest.raises(TypeError, match=r"counter0 cannot be copied.* by Counter.on\(...\)"):
        copy.deepcopy([a])
    with pytest.raises(TypeError, match="the handle of counter0 belongs to this process"):
        pickle.dumps(a)
    assert repr(a) == "<actor counter0: Counter on rank 1, here>"
    assert repr(cls.on(0)()) == "<actor counter2: Counter on rank 0, elsewhere>"
    assert repr(a.add) == "<method counter0.add>"


def test_actors_are_not_made_inside_steps() -> None:
    bench = Bench(2)
    cls = bench.actor(type("Counter", (Counter,), {}))
    with pytest.raises(ActorError, match=r"Counter.on\(0\) inside a step; make actors before"):
        bench.trace(lambda x: cls.on(0)(), torch.ones(1))


def test_attributes_in_a_step() -> None:
    bench = Bench(2)
    counter = bench.actor(type("Counter", (Counter,), {})).on(0)()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="read them in a method"):
        bench.trace(lambda x: x + counter.value, torch.ones(1))
    with pytest.raises(
        TraceError, match="takes <actor counter0: Counter on rank 0, here>, an actor"
    ):
        raise refusal(bench, lambda x: torch.nn.functional.mse_loss(x, counter), torch.ones(1))
