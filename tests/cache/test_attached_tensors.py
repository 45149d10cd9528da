"""Tensors that are attributes of a weight, such as one that lies as a kernel wants it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.api import step_function
from cg.launch.world.world import use_world
from cg.tracer.method.alike import Traces

from .edited import MemoryStore, described

ATTACHED: dict[str, list[Any]] = {
    "plain": [torch.zeros(3), torch.zeros(3)],
    "type": [torch.zeros(3, dtype=torch.float64), torch.zeros(3)],
    "shape": [torch.zeros(4), torch.zeros(3)],
    "layout": [torch.zeros(3).to_sparse(), torch.zeros(3)],
    "grad": [torch.zeros(3, requires_grad=True), torch.zeros(3)],
    "one for both": [torch.zeros(3)] * 2,
    "a number": [1, torch.zeros(3)],
}


@cg.actor
class Weights(nn.Module):
    def __init__(self, attached: list[Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        for linear, value in zip((self.up, self.down), attached, strict=True):
            linear.weight.attached = value  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(x))
        return result


def traced(attached: list[Any], store: MemoryStore) -> str:
    with use_world(VirtualWorld(1)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_function, "new_traces", lambda: Traces(store))
        actor = Weights.on(0)(attached)

        @cg.trace
        def step(x: Tensor) -> Tensor:
            return actor.forward(x)

        text = described(step.lower(torch.ones(2, 4)).trace).replace(actor.name, "actor")
        store.flush()
        return text


@pytest.mark.parametrize("change", ATTACHED)
def test_a_trace_serves_weights_with_attributes_that_are_alike(change: str) -> None:
    store = MemoryStore()
    fresh = traced([torch.zeros(3), torch.ones(3)], store)
    assert (store.kept, store.reasons) == (1, [])
    assert traced(ATTACHED[change], store) == fresh
    assert store.taken == (change == "plain")


def test_an_attribute_that_cannot_be_compared_is_a_miss_with_a_reason() -> None:
    store = MemoryStore()
    traced([object(), torch.zeros(3)], store)
    assert store.kept == 0
    assert store.reasons == ["a tensor of its actor cannot be compared"]
