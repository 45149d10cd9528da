"""Changes by a traced method besides its actor's attributes: an error, and taken back."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from cg.tracer.errors import TraceError
from cg.tracer.values.heap.kinds import is_cache

from .function_tools import trace

COUNT = 0
KEPT: dict[str, Any] = {}
STEPS: list[int] = []


class Plain:
    def __init__(self) -> None:
        self.count = 0
        self.last: Any = None


GLOBAL = Plain()
METRICS: dict[str, list[int]] = {"sizes": []}
TABLES: dict[str, dict[int, float]] = {"scales": {}}
STATES = [Plain()]


class Registry:
    count = 0
    seen: list[int] = []  # noqa: RUF012 - shared on purpose
    scale: float | None = None
    instance: Plain | None = None

    @classmethod
    def get(cls) -> Plain:
        if cls.instance is None:
            cls.instance = Plain()
        return cls.instance


class Slotted:
    __slots__ = ("count", "last")

    def __init__(self) -> None:
        self.count = 0
        self.last: Any = None


@functools.lru_cache
def mask(n: int) -> torch.Tensor:
    return torch.ones(n, n).tril()


class Actor(nn.Module):
    total = 0
    history: list[int] = []  # noqa: RUF012 - shared on purpose

    def __init__(self) -> None:
        super().__init__()
        self.slotted = Slotted()
        self.numbers = itertools.count()
        self.lines = (str(i) for i in range(3))
        self.python = random.Random(0)
        self.numpy = np.random.default_rng(0)
        self.old = np.random.RandomState(0)
        self.array = np.zeros(2)
        self.bytes = bytearray(2)
        self.register_buffer("a", torch.zeros(3))
        self.register_buffer("b", torch.ones(3))

    def counts_globally(self, x: torch.Tensor) -> torch.Tensor:
        global COUNT
        COUNT += 1
        return x * COUNT

    def appends_globally(self, x: torch.Tensor) -> torch.Tensor:
        STEPS.append(1)
        return x * len(STEPS)

    def appends_deep(self, x: torch.Tensor) -> torch.Tensor:
        METRICS["sizes"].append(len(x))
        return x

    def counts_deep(self, x: torch.Tensor) -> torch.Tensor:
        STATES[0].count += 1
        return x

    def counts_in_another_class(self, x: torch.Tensor) -> torch.Tensor:
        Registry.count += 1
        return x

    def appends_in_another_class(self, x: torch.Tensor) -> torch.Tensor:
        Registry.seen.append(1)
        return x

    def fills_tables_once(self, x: torch.Tensor) -> torch.Tensor:
        scales = TABLES["scales"]
        if len(x) not in scales:
            scales[len(x)] = 0.5
        if Registry.scale is None:
            Registry.scale = 2.0
        Registry.get().count = 3
        return x * scales[len(x)] * Registry.scale * Registry.get().count

    def nests_globally(self, x: torch.Tensor) -> torch.Tensor:
        KEPT["x"] = {"y": [x]}
        return x

    def changes_an_object(self, x: torch.Tensor) -> torch.Tensor:
        GLOBAL.count += 1
        return x * GLOBAL.count

    def keeps_in_an_object(self, x: torch.Tensor) -> torch.Tensor:
        GLOBAL.last = x
        return x

    def counts_in_its_class(self, x: torch.Tensor) -> torch.Tensor:
        Actor.total += 1
        return x * Actor.total

    def counts_in_its_type(self, x: torch.Tensor) -> torch.Tensor:
        type(self).total += 1
        return x * type(self).total

    def appends_in_its_class(self, x: torch.Tensor) -> torch.Tensor:
        self.history.append(1)
        return x * len(self.history)

    def keeps_in_its_class(self, x: torch.Tensor) -> torch.Tensor:
        Actor.last = x  # type: ignore[assignment]
        return x

    def fills_its_default(self, x: torch.Tensor, seen: list[int] = []) -> torch.Tensor:  # noqa: B006
        seen.append(1)
        return x * len(seen)

    def counts_in_slots(self, x: torch.Tensor) -> torch.Tensor:
        self.slotted.count += 1
        return x * self.slotted.count

    def keeps_in_slots(self, x: torch.Tensor) -> torch.Tensor:
        self.slotted.last = x
        return x

    def takes_next(self, x: torch.Tensor) -> torch.Tensor:
        return x * next(self.numbers)

    def reads_lines(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(next(self.lines))

    def draws(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.python.random()

    def draws_numpy(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.numpy.random()

    def draws_old_numpy(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.old.rand()

    def writes_array(self, x: torch.Tensor) -> torch.Tensor:
        self.array[0] += 1
        return x * float(self.array[0])

    def writes_bytes(self, x: torch.Tensor) -> torch.Tensor:
        self.bytes[0] += 1
        return x * self.bytes[0]

    def ties(self, x: torch.Tensor) -> torch.Tensor:
        self.a = self.b
        return x

    def swaps(self, x: torch.Tensor) -> torch.Tensor:
        self.a, self.b = self.b, self.a
        return x + self.a

    def masks(self, x: torch.Tensor) -> torch.Tensor:
        return x @ mask(3)

    def reads(self, x: torch.Tensor) -> torch.Tensor:
        KEPT.get("x")
        return x * (COUNT + GLOBAL.count + self.total + float(self.array[0]) + self.slotted.count)


LOST = [
    ("counts_globally", "'COUNT', outside of the actor's attributes (from 0 to 1)"),
    ("appends_globally", "'STEPS'"),
    ("appends_deep", "'METRICS.sizes'"),
    ("counts_deep", "'STATES.0.count'"),
    ("counts_in_another_class", "'Registry.count'"),
    ("appends_in_another_class", "'Registry.seen'"),
    ("nests_globally", "stores a traced value outside the actor, in 'KEPT.x'"),
    ("changes_an_object", "'GLOBAL.count'"),
    ("keeps_in_an_object", "stores a traced value outside the actor, in 'GLOBAL.last'"),
    ("counts_in_its_class", "'Actor.total'"),
    ("counts_in_its_type", "'Actor.total'"),
    ("appends_in_its_class", "'Actor.history'"),
    ("keeps_in_its_class", "stores a traced value outside the actor, in 'Actor.last'"),
    ("fills_its_default", "'a default of fills_its_default'"),
    ("counts_in_slots", "what is in the attribute 'slotted'"),
    ("keeps_in_slots", "what is in the attribute 'slotted'"),
    ("takes_next", "Actor.numbers is a count, which changes when it is used"),
    ("reads_lines", "Actor.lines is a generator"),
    ("draws", "what is in the attribute 'python'"),
    ("draws_numpy", "what is in the attribute 'numpy'"),
    ("draws_old_numpy", "what is in the attribute 'old'"),
    ("writes_array", "what is in the attribute 'array'"),
    ("writes_bytes", "what is in the attribute 'bytes'"),
    ("ties", "it lets 'a' share its memory with 'b'"),
]


def _all(actor: Actor) -> list[Any]:
    default = Actor.fills_its_default.__defaults__
    slots = actor.slotted
    return [
        *(COUNT, list(STEPS), dict(KEPT), dict(vars(GLOBAL)), Actor.total, list(Actor.history)),
        *(repr(METRICS), STATES[0].count, Registry.count, list(Registry.seen)),
        *(hasattr(Actor, "last"), repr(default), slots.count, slots.last, repr(actor.numbers)),
        *(actor.python.getstate(), repr(actor.numpy.bit_generator.state)),
        *(repr(actor.old.get_state()), actor.array.tolist(), bytes(actor.bytes)),
    ]


@pytest.mark.parametrize(("method", "message"), LOST, ids=[method for method, _ in LOST])
def test_a_change_is_refused_and_taken_back(method: str, message: str) -> None:
    actor = Actor()
    before = _all(actor)
    with pytest.raises(TraceError) as caught:
        trace(actor, method, torch.ones(2, 3))
    assert message in caught.value.reason
    assert caught.value.loc is not None
    assert caught.value.loc.file == __file__
    assert caught.value.loc.function == method
    assert "@cg.opaque" in caught.value.remedy or ".clone()" in caught.value.remedy
    assert _all(actor) == before
    assert type(actor) is Actor


def test_reading_is_allowed() -> None:
    actor = Actor()
    traced = trace(actor, "reads", torch.ones(2, 3))
    assert torch.equal(traced.body(torch.ones(2, 3))[0], torch.zeros(2, 3))


def test_what_is_filled_once_is_kept() -> None:
    actor, x = Actor(), torch.ones(2, 3)
    traced = trace(actor, "fills_tables_once", x)
    assert (TABLES, Registry.scale, Registry.get().count) == ({"scales": {2: 0.5}}, 2.0, 3)
    assert torch.equal(traced.body(x)[0], torch.full((2, 3), 3.0))


def test_buffers_may_change_places() -> None:
    actor = Actor()
    a, b = actor.a, actor.b
    traced = trace(actor, "swaps", torch.ones(2, 3))
    assert torch.equal(traced.body(torch.ones(2, 3))[0], torch.full((2, 3), 2.0))
    assert torch.equal(actor.a, b)
    assert torch.equal(actor.b, a)


@pytest.fixture
def _cold() -> Iterator[None]:
    mask.cache_clear()
    yield
    mask.cache_clear()


@pytest.mark.usefixtures("_cold")
def test_a_cache_keeps_no_traced_value() -> None:
    trace(Actor(), "masks", torch.ones(2, 3))
    assert not isinstance(mask(3), FakeTensor)


class Absent(type):
    """The class of a name that stands for a library that is not installed."""

    def __getattribute__(cls, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattribute__(name)
        raise ImportError("the library is not installed")


class AbsentReader(metaclass=Absent):
    """What `from transformers import Reader` gives without the library that the reader needs."""


def test_a_name_of_a_library_that_is_not_installed_is_no_obstacle() -> None:
    assert not is_cache(AbsentReader)
    assert is_cache(mask)
    x = torch.ones(2, 3)
    assert torch.equal(trace(Actor(), "swaps", x).body(x)[0], torch.full((2, 3), 2.0))


def closure() -> tuple[type[nn.Module], Any]:
    count = 0

    def bump() -> int:
        nonlocal count
        count += 1
        return count

    class Closed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * bump()

    return Closed, lambda: count


def test_a_closure_is_put_back() -> None:
    cls, count = closure()
    with pytest.raises(TraceError, match=r"it changes 'count', outside of the actor's attributes"):
        trace(cls(), "forward", torch.ones(2, 3))
    assert count() == 0


DRAWS = [
    (lambda: random.uniform(0, 1) < 0.0, False),
    (lambda: random.uniform(1, 0) <= 1, True),
    (lambda: random.random() < 1, True),
    (lambda: random.random() >= 1, False),
    (lambda: random.random() > -0.5, True),
    (lambda: random.random() < 0.0, False),
    (lambda: random.uniform(0, 1) < 1, None),
    (lambda: random.uniform(0, 1) > 0, None),
    (lambda: random.random() <= 0, None),
    (lambda: random.random() < 0.5, None),
    (lambda: random.random() == 2, None),
    (lambda: round(random.random()), None),
    (lambda: random.random() or 1, None),
    (lambda: 1 - random.random() < 2, None),
    (lambda: float(random.random()), None),
]


@pytest.mark.parametrize(("condition", "decided"), DRAWS)
def test_what_is_drawn_may_decide_nothing(condition: Any, decided: bool | None) -> None:
    """As where layers are left out at random, with a chance of 0."""

    class LeavesOut(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if condition() else x + 2

    before = random.getstate()
    if decided is None:
        with pytest.raises(TraceError, match="draws from or seeds Python's random") as caught:
            trace(LeavesOut(), "forward", torch.zeros(2))
        assert "layerdrop=0.0" in caught.value.remedy
    else:
        (result,) = trace(LeavesOut(), "forward", torch.zeros(2)).body(torch.zeros(2))
        assert float(result[0]) == (1 if decided else 2)
    assert random.getstate() == before
