"""Bodies of traced functions: their code is generated when something asks for it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg
from cg.launch.api import lowered as lowered_module
from cg.launch.api.compiled_programs import make_variant
from cg.tracer.graph.codegen import codegen
from cg.tracer.graph.codegen.bodies import GraphBody
from cg.tracer.record.collector import collector_paused
from tests.tracer.function_tools import trace


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu() * torch.arange(4)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The sources that are written, in order."""
    found: list[Any] = []
    write = codegen._source

    def noting(writer: Any) -> Any:
        found.append(writer)
        return write(writer)

    monkeypatch.setattr(codegen, "_source", noting)
    return found


def body_of(layer: nn.Module) -> GraphBody:
    body = trace(layer, "forward", torch.randn(2, 4)).body
    assert isinstance(body, GraphBody)
    return body


def test_a_trace_writes_no_code(written: list[Any]) -> None:
    layer, x = Layer(), torch.randn(2, 4)
    body = body_of(layer)
    assert not written
    (found,) = body.run(x)
    assert len(written) == 1
    torch.testing.assert_close(found, layer(x), rtol=0, atol=0)
    body.run(x)
    assert len(written) == 1
    assert body.run is body.run


def test_lowering_a_step_writes_no_code(written: list[Any]) -> None:
    actors = [cg.actor(Layer).on(0)() for _ in range(3)]

    @cg.trace
    def step(x: Tensor) -> Tensor:
        for actor in actors:
            x = actor.forward(x)
        loss = x.sum()
        cg.backward(loss)
        return loss

    x = torch.randn(2, 4)
    lowered = step.lower(x)
    assert not written
    found = lowered.compile()(x)
    assert written
    torch.testing.assert_close(found, Layer()(Layer()(Layer()(x))).sum(), rtol=0, atol=0)


def test_code_around_a_body_is_made_with_it(written: list[Any]) -> None:
    calls: list[str] = []

    def wrap(run: Callable[..., Any]) -> Callable[..., Any]:
        calls.append("wrapped")
        return lambda *inputs: [calls.append("run"), run(*inputs)][1]

    body = body_of(Layer()).wrapped(wrap)
    assert not calls
    assert not written
    body(torch.randn(2, 4))
    body(torch.randn(2, 4))
    assert calls == ["wrapped", "run", "run"]
    assert body.refit(None).run is not None
    assert calls == ["wrapped", "run", "run", "wrapped"]


def test_constants_are_plain_tensors_wherever_code_is_generated() -> None:
    with torch.inference_mode():
        run = body_of(Layer()).run
    constants = [v for v in run.__globals__.values() if isinstance(v, Tensor)]
    assert len(constants) == 1
    assert not constants[0].is_inference()


@pytest.mark.parametrize(("objects", "is_asked"), [(1_000, False), (300_000, True)])
def test_frozen_objects_are_counted_behind_large_traces_alone(
    objects: int, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def count() -> int:
        asked.append(objects)
        return 1

    monkeypatch.setattr(gc, "get_freeze_count", count)
    gc.collect(0)
    with collector_paused():
        made = [[] for _ in range(objects)]
    assert bool(asked) is is_asked
    assert len(made) == objects


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before_a_trace(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = cg.actor(Layer).on(0)()

    @cg.trace
    def step(x: Tensor, fails: bool) -> Tensor:
        assert not gc.isenabled()
        if fails:
            raise ValueError("as it was asked to")
        return actor.forward(x)

    paused: list[bool] = []

    def noted(*args: Any) -> Any:
        paused.append(gc.isenabled())
        return make_variant(*args)

    monkeypatch.setattr(lowered_module, "make_variant", noted)
    was_on = gc.isenabled()
    has_frozen = gc.get_freeze_count() > 0
    try:
        (gc.enable if enabled else gc.disable)()
        lowered = step.lower(torch.randn(2, 4), False)
        assert gc.isenabled() is enabled
        assert lowered.compile()
        assert paused == [False]
        assert gc.isenabled() is enabled
        with pytest.raises(ValueError, match="asked to"):
            step.lower(torch.randn(2, 4), True)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_on else gc.disable)()
    assert (gc.get_freeze_count() > 0) == has_frozen  # the dead among them count no longer
