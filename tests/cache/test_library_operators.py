"""Operators of other libraries: a trace with one serves while the operator is the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.api import step_function
from cg.launch.world.world import use_world
from cg.tracer.method.alike import Traces
from cg.tracer.values.operators import plain_operator

from .edited import MemoryStore, described

NAME = "cg_tests_scaled"
SCHEMA = "scaled(Tensor x, float by=2.0) -> Tensor"


def double(x: Tensor, by: float = 2.0) -> Tensor:
    return x * by


def like(x: Tensor, by: float = 2.0) -> Tensor:
    return torch.empty_like(x)


@dataclass(frozen=True)
class Operator:
    """A library's operator: its schema, and kernels by their keys."""

    kernels: dict[str, Callable[..., Any]]
    schema: str = SCHEMA

    def defined(self) -> torch.library.Library:
        library = torch.library.Library(NAME, "DEF")
        library.define(self.schema)
        for key, kernel in self.kernels.items():
            library.impl("scaled", kernel, key)
        return library


PLAIN = Operator({"CPU": double, "Meta": like})


@cg.actor
class Scaler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = getattr(torch.ops, NAME).scaled(x)
        return scaled + self.linear.bias

    def trained(self, x: Tensor) -> Tensor:
        return self.forward(self.linear(x))


def traced(operator: Operator, store: MemoryStore | None, method: str = "forward") -> str:
    """All that a trace of a step with the operator holds, as text."""
    library = operator.defined()
    try:
        with use_world(VirtualWorld(1)), pytest.MonkeyPatch.context() as patch:
            patch.setattr(step_function, "new_traces", lambda: Traces(store))
            actor = Scaler.on(0)()

            @cg.trace
            def step(x: Tensor) -> Tensor:
                with torch.set_grad_enabled(method == "trained"):
                    return getattr(actor, method)(x)  # type: ignore[no-any-return]

            text = described(step.lower(torch.ones(2, 4)).trace)
            if store is not None:
                store.flush()
            return text.replace(actor.name, "actor")
    finally:
        library._destroy()


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    traced(PLAIN, store)
    assert (store.kept, store.reasons) == (1, [])
    return store


def test_the_trace_of_an_equal_operator_serves(store: MemoryStore) -> None:
    fresh = traced(PLAIN, None)
    assert f"{NAME}.scaled.default" in fresh
    assert traced(PLAIN, store) == fresh
    assert (store.taken, store.kept) == (1, 1)


def wide(x: Tensor, by: float = 2.0) -> Tensor:
    return torch.empty_like(x, dtype=torch.float64)


def turned(x: Tensor, by: float = 2.0) -> Tensor:
    return torch.empty(x.shape[::-1], device=x.device).t()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float = 2.0) -> Tensor:
        return x * by

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


OTHERS = {
    "type": Operator({"CPU": double, "Meta": wide}),
    "strides": Operator({"CPU": double, "Meta": turned}),
    "default": Operator({"CPU": double, "Meta": like}, SCHEMA.replace("2.0", "3.0")),
    "decomposed": Operator({"CompositeImplicitAutograd": double}),
    "derivative": Operator({"CPU": double, "Meta": like, "Autograd": Doubled.apply}),
}


@pytest.mark.parametrize("change", OTHERS)
def test_another_operator_of_the_name_is_traced_anew(change: str, store: MemoryStore) -> None:
    fresh = traced(OTHERS[change], None)
    assert traced(OTHERS[change], store) == fresh
    assert store.taken == 0


@pytest.mark.parametrize(
    "operator",
    [
        OTHERS["decomposed"],
        OTHERS["derivative"],
        Operator(PLAIN.kernels, "scaled(Tensor(a!) x, float by=2.0) -> Tensor(a!)"),
        Operator(PLAIN.kernels, "scaled(Tensor(a) x, float by=2.0) -> Tensor(a)"),
    ],
    ids=["decomposed", "derivative", "writes", "views"],
)
def test_an_operator_that_is_more_than_a_node_is_not_kept(operator: Operator) -> None:
    store = MemoryStore()
    library = operator.defined()
    try:
        packet = getattr(torch.ops, NAME).scaled
        assert plain_operator(packet) is None
    finally:
        library._destroy()
    if "(a" not in operator.schema:
        traced(operator, store)
        assert (store.kept, store.taken) == (0, 0)
        assert "cannot be compared" in store.reasons[0]


def test_a_trace_with_a_gradient_through_the_operator_is_not_kept() -> None:
    """What torch records for an operator without a derivative is up to torch's settings."""
    store = MemoryStore()
    traced(PLAIN, store, "trained")
    assert (store.kept, store.taken) == (0, 0)
