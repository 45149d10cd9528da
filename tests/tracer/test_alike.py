"""Layers and actors that are alike are traced once; those that differ in anything never."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cg.tracer.function.functions import Functions
from cg.tracer.method import joint
from cg.tracer.method.reuse import templates
from cg.tracer.values.interface import MethodTarget
from cg.tracer.values.specs import TensorSpec

from ..sampling import examples, scale
from . import alike_models as models
from .alike_models import CHANGES, SIZE, Layer, LayeredStage
from .function_tools import Run, assert_equal, cotangents, run_eager, signature, state_of

pytestmark = pytest.mark.timeout(300)
X = torch.linspace(-1, 1, 3 * SIZE).reshape(3, SIZE)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return counted(monkeypatch)


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the traces that are made, and the blocks that are copied into them."""
    counts: Counter[str] = Counter()
    trace, run = joint._JointTrace.trace, templates.Emitter.run

    def traced(self: Any) -> Any:
        counts["traces"] += 1
        return trace(self)

    def copied(self: Any, taken: Any) -> Any:
        counts["copies"] += 1
        return run(self, taken)

    monkeypatch.setattr(joint._JointTrace, "trace", traced)
    monkeypatch.setattr(templates.Emitter, "run", copied)
    return counts


Build = Callable[[], LayeredStage]


def stage(*changes: Callable[[Layer], None] | None) -> Build:
    """Makes a stage of layers, each of which something may be done to; always the same."""

    def build() -> LayeredStage:
        torch.manual_seed(0)
        made = LayeredStage(len(changes))
        for layer, change in zip(made.layers, changes, strict=True):
            assert isinstance(layer, Layer)
            if change is not None:
                change(layer)
        return made

    return build


class Tracing:
    """One step, whose functions share traces. Values are compared with plain Python's."""

    def __init__(self) -> None:
        self.functions = Functions()
        self.actors: list[nn.Module] = []

    def check(self, build: Build, needs_grad: bool = True) -> nn.Module:
        """Trace an actor, and compare it bit for bit with another of the same making."""
        actor, plain = build(), build()
        self.actors.append(actor)
        name = f"a{len(self.actors)}"
        value = X.clone().requires_grad_(needs_grad)
        found = self._run(name, actor, value)
        expected = run_eager(plain, "forward", (value,), {}, 3)
        assert_equal(found.outputs, expected.outputs)
        for ours, theirs in zip(found.input_grads, expected.input_grads, strict=True):
            zeros = torch.zeros_like(X) if theirs is None else theirs
            assert_equal([zeros if ours is None else ours], [zeros])
        for path, tensor in expected.state.items():
            assert_equal([found.state[path]], [tensor])
        for path, gradient in expected.grads.items():
            ours = found.grads[path]
            assert (ours is None) == (gradient is None), path
            if ours is not None:
                assert_equal([ours], [gradient])
        return actor

    def _run(self, name: str, actor: nn.Module, value: Tensor) -> Run:
        target, call = MethodTarget(name, actor, "forward"), signature(value)
        traced = self.functions.trace(target, call, f"{name}.forward", None)
        assert traced.guard is None or traced.guard() is None
        specs = [traced.results.leaves[i] for i in traced.results.values]
        needed = tuple(
            i for i, s in enumerate(specs) if isinstance(s, TensorSpec) and s.requires_grad
        )
        inputs = (0,) if value.requires_grad else ()
        torch.manual_seed(3)
        if not needed:
            assert callable(traced.body)
            return _as_run(actor, traced.body(value.detach()), [None] * len(inputs))
        vjp = self.functions.trace_vjp(target, call, f"{name}.vjp", needed, inputs, None)
        results = vjp.first.only_body(value.detach())
        saved = results[len(specs) :]
        made = vjp.second.only_body(*saved, *cotangents([results[i] for i in needed]))
        gradients = made[: len(inputs)]  # a unit stands for none
        return _as_run(actor, results[: len(specs)], gradients)


def _as_run(actor: nn.Module, results: Sequence[Any], gradients: Sequence[Any]) -> Run:
    state = state_of(actor)
    values = {name: tensor.detach().clone() for name, tensor in state.items()}
    found = {name: t.grad if t.is_leaf else None for name, t in state.items()}
    return Run(list(results), list(gradients), values, found)


def test_actors_that_are_alike_are_traced_once(traces: Counter[str]) -> None:
    step = Tracing()
    for _ in range(4):
        step.check(stage(None))
    assert traces["traces"] == 2  # the forward, and that with its backward


def test_layers_that_are_alike_are_traced_once(traces: Counter[str]) -> None:
    Tracing().check(stage(*[None] * 5))
    # Of each of both traces, but the first layer; and again where the forward is run twice.
    assert traces == {"traces": 2, "copies": 4 + 5 + 4}


def test_layers_are_traced_once_for_all_actors(traces: Counter[str]) -> None:
    step = Tracing()
    step.check(stage(*[None] * 3))
    before = traces["copies"]
    step.check(stage(*[None] * 4))
    assert traces["traces"] == 4
    assert traces["copies"] - before == 4 * 3


@pytest.mark.parametrize("name", CHANGES)
def test_an_actor_that_differs(name: str, traces: Counter[str]) -> None:
    """Between actors as usual: each computes what plain Python does."""
    step = Tracing()
    for build in (stage(None), stage(CHANGES[name]), stage(None)):
        step.check(build)
    assert 2 <= traces["traces"] <= 4
    if name not in SAME_GRAPH:
        assert traces["traces"] > 2


LAYERS = list(CHANGES) if scale() > 1 else list(CHANGES)[::3]
"""Blocks are compared by the same log as actors, so a default run takes a third of the changes."""


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_that_differs(name: str, traces: Counter[str]) -> None:
    change = CHANGES[name]
    Tracing().check(stage(None, change, None))


SAME_GRAPH = {"the values of a buffer"}
"""Differences between actors that need no other graph."""


def test_a_global_that_has_changed(traces: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    step = Tracing()
    reads = stage(models.setting("reads_globals", True))
    step.check(reads)
    step.check(reads)
    assert traces["traces"] == 2
    for change in (
        lambda: monkeypatch.setattr(models, "SCALE", 2.0),
        lambda: monkeypatch.setitem(models.TABLE, "scale", [3.0]),
        lambda: monkeypatch.setattr(models.Shared, "factor", 5.0),
    ):
        before = traces["traces"]
        change()
        step.check(reads)
        assert traces["traces"] == before + 2


def test_a_patched_class(traces: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    step = Tracing()
    step.check(stage(None))
    monkeypatch.setattr(models.Mlp, "forward", lambda self, x: self.down(self.up(x)))
    step.check(stage(None))
    assert traces["traces"] == 4


def test_settings_of_torch(traces: Counter[str]) -> None:
    step = Tracing()
    step.check(stage(None))
    try:
        torch.set_default_dtype(torch.float64)
        step.check(stage(lambda layer: layer.float()))
    finally:
        torch.set_default_dtype(torch.float32)
    assert traces["traces"] == 4


def test_an_input_without_a_gradient(traces: Counter[str]) -> None:
    step = Tracing()
    step.check(stage(None, None), needs_grad=False)
    step.check(stage(None, None), needs_grad=True)
    step.check(stage(None, None), needs_grad=False)
    assert traces["traces"] == 4


def test_random_numbers_are_drawn_for_each_actor(traces: Counter[str]) -> None:
    build = stage(*[lambda layer: setattr(layer.dropout, "p", 0.5)] * 3)
    step = Tracing()
    step.check(build)
    step.check(build)
    step.check(stage(*[lambda layer: setattr(layer.dropout, "p", 0.25)] * 3))
    assert traces["traces"] == 4


def test_guards_are_those_of_each_actor() -> None:
    functions = Functions()
    actors = [stage(None, None)() for _ in range(3)]
    guards = []
    for number, actor in enumerate(actors):
        target = MethodTarget(f"a{number}", actor, "forward")
        guards.append(functions.trace(target, signature(X), f"a{number}.forward", None).guard)
    layer = actors[1].layers[1]
    assert isinstance(layer, Layer)
    layer.scale = 7.0
    said = [guard() if guard is not None else "" for guard in guards]
    assert said[0] is None
    assert said[2] is None
    assert said[1] is not None
    assert "'layers.1.scale' was 1.0" in said[1]


def test_bodies_are_bound_to_their_actors() -> None:
    """A parameter that is replaced by another one is that of its own actor."""
    step = Tracing()
    one, other = (step.check(stage(None)) for _ in range(2))
    functions = step.functions
    target = MethodTarget("other", other, "forward")
    body = functions.trace(target, signature(X), "other.forward", None).body
    assert callable(body)
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.zero_()
    assert torch.equal(body(X)[0], other(X).detach())
    assert not torch.equal(body(X)[0], one(X).detach())


class Skips(LayeredStage):
    """Uses the input of a layer after it: gradients add up in the order of plain Python."""

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for layer in self.layers:
            before = x
            x = layer(x) + 0.1 * before
        return x * first


class Keeps(LayeredStage):
    """Returns what is inside of it."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        kept = []
        for layer in self.layers:
            x = layer(x)
            kept.append(x)
        return tuple(kept)


class InPlace(LayeredStage):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x * 1
            x += 1
        return x


class Summed(LayeredStage):
    """The last layer gets a gradient that is expanded."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Leaks(LayeredStage):
    """A layer hands a value over past its results."""

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.function = lambda h: (found.append(h), h)[1]
            x = layer(x)
            layer.function = None
        return x + found[-1]


class Modes(LayeredStage):
    """Calls its layers under other settings of torch."""

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number % 2 == 1):
                x = layer(x)
        with torch.no_grad():
            return x * self.layers[0](x)  # type: ignore[no-any-return]


class Twice(LayeredStage):
    """Calls every layer twice, so that each has two gradients."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return x


@pytest.mark.parametrize("kind", [Skips, Keeps, InPlace, Summed, Leaks, Modes, Twice])
def test_methods_around_equal_layers(kind: type[LayeredStage]) -> None:
    def build() -> LayeredStage:
        torch.manual_seed(0)
        return kind(3)

    step = Tracing()
    step.check(build)
    step.check(build)
    step.check(build, needs_grad=False)


NAMES = sorted(CHANGES.keys() - {"a scripted module"})
EDITS = st.lists(st.lists(st.sampled_from(NAMES), max_size=2), min_size=1, max_size=4)


@examples(2)
@given(st.lists(EDITS, min_size=2, max_size=3))
def test_random_changes(stages: list[list[list[str]]]) -> None:
    """Stages of layers to which random things have been done."""

    def edit(names: list[str]) -> Callable[[Layer], None]:
        def change(layer: Layer) -> None:
            for name in names:
                CHANGES[name](layer)

        return change

    step = Tracing()
    for layers in stages:
        build = stage(*map(edit, layers))
        try:
            build()(X)
        except (RuntimeError, TypeError, AttributeError, KeyError):
            continue  # what has been done does not fit together
        step.check(build)
