"""Why a step is compiled again: what the logger `cg` and `compilations` say."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from cg.tracer.method import joint
from cg.tracer.record.session.signature import CallSignature, signature_of
from cg.tracer.record.step import describe_inputs
from cg.tracer.torch_modes import Ambient

from ..sampling import examples
from ..worlds import virtual_world

X = torch.arange(6.0).reshape(2, 3)
WIDE = torch.ones(2, 4)


@cg.actor
class Times:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def scale(self, x: Tensor) -> Tensor:
        return x * self.factor


class Batch(NamedTuple):
    x: Any
    n: Any


class Default:
    """A value that prints as others do."""

    def __repr__(self) -> str:
        return "a default"


a_world_of_two = virtual_world(2)


def scaled() -> cg.Step:
    times = Times.on(1)(2.0)

    @cg.trace
    def step(x: Any, y: Any = None, *rest: Any, n: int = 1, **more: Any) -> Any:
        return times.scale(x if isinstance(x, Tensor) else x[0])

    return step


def call(*args: Any, **kwargs: Any) -> Callable[[cg.Step], Any]:
    return lambda step: step(*args, **kwargs)


def under(mode: Any, *args: Any) -> Callable[[cg.Step], Any]:
    def run(step: cg.Step) -> Any:
        with mode():
            return step(*args)

    return run


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the logger `cg` has said at the level INFO."""
    records = [record for record in caplog.records if record.name == "cg"]
    return [record.getMessage() for record in records if record.levelno == logging.INFO]


@contextmanager
def doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CASES = {
    "a shape": (call(X), call(WIDE), "x was float32[2,3], is float32[2,4]"),
    "a dtype": (call(X), call(X.double()), "x was float32[2,3], is float64[2,3]"),
    "a static value": (call(X, 1), call(X, True), "y was 1, is True"),
    "a value by name": (call(X, n=1), call(X, n=2), "n was 1, is 2"),
    "several": (
        call(X, WIDE, n=1),
        call(WIDE, X, n=2),
        "x was float32[2,3], is float32[2,4]; y was float32[2,4], is float32[2,3]; n was 1, is 2",
    ),
    "a leaf": (call([X, (2,)]), call([X, (3,)]), "x.1.0 was 2, is 3"),
    "a container": (call([X]), call((X,)), "x was [float32[2,3]], is (float32[2,3],)"),
    "a class": (
        call({0: X, "k": [2, 3]}),
        call(Batch(X, 2)),
        "x was {0: float32[2,3], 'k': [2, 3]}, is Batch(float32[2,3], 2)",
    ),
    "the order of a dictionary": (
        call(X, {"a": 1, "b": 2}),
        call(X, {"b": 2, "a": 1}),
        "y was {'a': 1, 'b': 2}, is {'b': 2, 'a': 1}",
    ),
    "an argument more": (call(X), call(X, 1), "y was left out, is 1"),
    "an argument less": (call(X, z=1), call(X), "more was {'z': 1}, is left out"),
    "more by position": (call(X, 1, 2), call(X, 1, 2, 3), "rest was (2,), is (2, 3)"),
    "what prints alike": (
        call(X, Default()),
        call(X, Default()),
        "y is another value that prints as a default",
    ),
    "requires_grad": (
        call(X),
        call(X.clone().requires_grad_()),
        "x was float32[2,3], is float32[2,3] with requires_grad",
    ),
    "grad mode": (call(X), under(torch.no_grad, X), "grad mode was on, is off"),
    "the default dtype": (
        call(X),
        under(doubles, X),
        "the default dtype was torch.float32, is torch.float64",
    ),
    "the default device": (
        call(X),
        under(lambda: torch.device("cpu", 0), X),
        "the default device was cpu, is cpu:0",
    ),
    "many": (
        call([X, 1, 2, 3, 4, 5]),
        call([X, 2, 3, 4, 5, 6]),
        "x.1 was 1, is 2; x.2 was 2, is 3; x.3 was 3, is 4; x.4 was 4, is 5; 1 more changes",
    ),
}


@pytest.mark.parametrize(("first", "second", "why"), CASES.values(), ids=CASES.keys())
def test_a_change_is_named(
    first: Callable[[cg.Step], Any],
    second: Callable[[cg.Step], Any],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    step = scaled()
    with caplog.at_level(logging.INFO, "cg"):
        first(step)
        first(step)
        assert logged(caplog) == []
        second(step)
        second(step)
        first(step)
    assert logged(caplog) == [f"step step is compiled again: {why}"]
    assert step.compilations == ("first call", why)


def test_the_nearest_signature_is_compared() -> None:
    step = scaled()
    for args in ((X, 1), (WIDE, 2), (WIDE, 3), (X.double(), 1), (X, 3)):
        step(*args)
    assert step.compilations[1:] == (
        "x was float32[2,3], is float32[2,4]; y was 1, is 2",
        "y was 2, is 3",
        "x was float32[2,3], is float64[2,3]",
        "x was float32[2,4], is float32[2,3]",  # of two that are as near, the later one
    )


def test_names_that_hold_other_actors(caplog: pytest.LogCaptureFixture) -> None:
    class Model:
        def __init__(self) -> None:
            self.stages = [Times.on(0)(2.0), Times.on(1)(3.0)]

        @cg.trace
        def run(self, x: Tensor) -> Tensor:
            for stage in self.stages:
                x = stage.scale(x)
            return x

    model = Model()
    with caplog.at_level(logging.INFO, "cg"):
        assert torch.equal(model.run(X), X * 6)
        assert torch.equal(model.run(WIDE), WIDE * 6)
        model.stages[1] = Times.on(1)(5.0)
        assert torch.equal(model.run(X), X * 10)
        assert torch.equal(model.run(WIDE), WIDE * 10)
    shape = "x was float32[2,3], is float32[2,4]"
    moved = "the name 'self.stages' holds other actors"
    assert model.run.compilations == ("first call", shape, moved, shape)
    again = "step run is compiled again: "
    assert logged(caplog) == [again + shape, again + moved, again + shape]


def test_a_cache_that_was_cleared() -> None:
    step = scaled()
    step.clear_cache()
    step(X)
    step.clear_cache()
    step.clear_cache()
    assert torch.equal(step(WIDE), WIDE * 2)
    assert step.compilations == ("first call", "clear_cache() was called")


def test_what_is_not_compiled_is_no_compilation(caplog: pytest.LogCaptureFixture) -> None:
    step = scaled()
    with caplog.at_level(logging.INFO, "cg"):
        step.lower(X).compile()(X)
        with pytest.raises(cg.TraceError, match="scale cannot be traced"):
            step([None])
        with pytest.raises(cg.InputError, match="missing a required argument: 'x'"):
            step(y=X)
        step(X)
        with pytest.raises(cg.TraceError, match="scale cannot be traced"):
            step([None])
    assert logged(caplog) == []
    assert step.compilations == ("first call",)


# -- arguments by position and by name ----------------------------------------------------------


def test_arguments_by_position_and_by_name_are_one_signature() -> None:
    times = Times.on(1)(2.0)

    @cg.trace
    def step(x: Tensor, y: Tensor, n: int = 1, *, flag: bool = False) -> Tensor:
        return times.scale(x - y) * n

    calls = [
        call(X, X + 1, 3, flag=True),
        call(X, y=X + 1, n=3, flag=True),
        call(flag=True, n=3, y=X + 1, x=X),
    ]
    for run in calls:
        assert torch.equal(run(step), torch.full_like(X, -6.0))
    assert step.compilations == ("first call",)
    step(x=X, y=X, flag=True)
    step(X, X, flag=True)
    assert step.compilations[1:] == ("n was 3, is left out",)


def test_a_method_and_its_arguments_by_name() -> None:
    class Model:
        times = Times.on(0)(3.0)

        @cg.trace
        def run(self, x: Tensor, y: Tensor) -> Tensor:
            return self.times.scale(x) + y

    model = Model()
    assert torch.equal(model.run(X, X), X * 4)
    assert torch.equal(model.run(y=X, x=X), X * 4)
    assert len(model.run.compilations) == 1


def test_the_order_of_further_arguments_is_that_of_the_call() -> None:
    @cg.trace
    def step(x: Tensor, **more: Tensor) -> Tensor:
        return x + next(iter(more.values()))

    assert torch.equal(step(X, a=X, b=-X), X * 2)
    assert torch.equal(step(X, b=-X, a=X), X * 0)
    assert step.compilations[1:] == (
        "more was {'a': float32[2,3], 'b': float32[2,3]}, "
        "is {'b': float32[2,3], 'a': float32[2,3]}",
    )


def test_a_wrapper_may_tell_names_from_positions() -> None:
    def doubling(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **{name: 2 * value for name, value in kwargs.items()})

        return wrapper

    @cg.trace
    @doubling
    def step(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    assert torch.equal(step(X, X), X * 2)
    assert torch.equal(step(X, y=X), X * 3)
    assert torch.equal(step(X, X), X * 2)
    assert step.compilations[1:] == ("other arguments are given by name, and not by position",)


LEAVES = st.sampled_from([X, WIDE, X.double(), 1, 1.0, True, 0.0, -0.0, "1", None, torch.float32])
ARGUMENTS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.lists(inner, max_size=2).map(tuple)
        | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
        | st.builds(Batch, inner, inner)
    ),
    max_leaves=3,
)
CALLS = st.tuples(
    st.lists(ARGUMENTS, min_size=1, max_size=3).map(tuple),
    st.dictionaries(st.sampled_from(["n", "u", "v"]), ARGUMENTS, max_size=2),
    st.booleans(),
)


@examples(400)
@given(CALLS, CALLS)
def test_signatures_differ_where_a_change_is_named(one: Any, other: Any) -> None:
    def taken(x: Any, y: Any = None, *rest: Any, n: Any = 1, **more: Any) -> None: ...

    keys, texts = [], []
    for args, kwargs, grad in (one, other):
        with torch.set_grad_enabled(grad):
            keys.append(signature_of(args, kwargs))
            place = cg.on(0)
            inputs = describe_inputs(taken, args, kwargs, "step", place, host_only=False)
            texts.append(CallSignature(inputs, Ambient.now()))
    changes = texts[1].changes_since(texts[0])
    assert (changes == []) == (keys[0] == keys[1])
    assert len(texts[0].changes_since(texts[1])) == len(changes)


def test_signatures_apart_share_traces_and_are_graphs_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A number chooses an actor; the call of another one, which is alike, is traced once."""
    traced: list[str] = []
    trace = joint._JointTrace.trace

    def count(self: Any) -> Any:
        traced.append(self.call.shown)
        return trace(self)

    monkeypatch.setattr(joint._JointTrace, "trace", count)
    with use_world(VirtualWorld(1)):
        first = Times.on(0)(2.0)
        others = [Times.on(0)(3.0), Times.on(0)(5.0)]

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def step(x: Tensor, which: int) -> Tensor:
            return others[which].scale(first.scale(x))

        lowered = step.lower_many([(X, 0), (X, 1)])
        assert len(traced) == 3  # of three factors; that of both signatures once
        graphs = [each.compile() for each in lowered.apart()]
        assert [len(graph.variants) for graph in graphs] == [1, 1]
        futures = [graph.execute(X, which) for which, graph in enumerate(graphs)]
        assert torch.equal(futures[1].result(), X * 10)
        assert torch.equal(futures[0].result(), X * 6)
        with pytest.raises(cg.InputError):
            graphs[0].execute(X, 1)
        for graph in graphs:
            graph.close()
        (alone,) = step.lower(X, 1).apart()
        with alone.compile() as graph:
            assert torch.equal(graph.execute(X, 1).result(), X * 10)
