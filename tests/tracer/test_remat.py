"""`cg.remat` in a step: what it takes, what it refuses, and that it changes no value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world


@cg.actor
class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)).relu()

    def count(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * 2.0


def step_of(layer: Any, *methods: Any) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        x = layer.forward(x)
        for method in methods:
            x = method(x)
        loss = x.sum()
        cg.backward(loss)
        return loss

    return step


def test_it_changes_no_value() -> None:
    x = torch.randn(4, 3)
    with use_world(VirtualWorld(1)):
        layer = Layer.on(0)()
        found = []
        for method in (layer.forward, cg.remat(layer.forward), cg.remat(layer)):
            loss = cg.trace(step_of(layer, method))(x)
            grads = [p.grad for p in layer.local.parameters()]
            layer.local.zero_grad()
            found.append([loss, *grads])
        plain = step_of(layer, cg.remat(layer.forward))(x).detach()
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert torch.allclose(plain, found[0][0])


def test_it_is_traced_once_however_often_it_is_asked_for() -> None:
    with use_world(VirtualWorld(1)):
        layer = Layer.on(0)()
        assert cg.remat(layer.forward) is cg.remat(layer.forward)
        assert cg.remat(cg.remat(layer.forward)) is cg.remat(layer.forward)
        several = [cg.remat(layer.forward) for _ in range(3)]
        lowered = cg.trace(step_of(layer, *several)).lower(torch.randn(4, 3))
    assert sum(".forward.vjp" in name for name in lowered.trace.module.vjps) == 1
    assert sum(".forward.1.vjp" in name for name in lowered.trace.module.vjps) == 1


def test_what_cannot_be_computed_again_is_refused() -> None:
    with use_world(VirtualWorld(1)):
        layer = Layer.on(0)()
        step = cg.trace(step_of(layer, cg.remat(layer.count)))
        message = "cannot be computed again.*changes the actor's state"
        with pytest.raises(cg.TraceError, match=message) as caught:
            step.lower(torch.randn(4, 3))
    assert "call it without cg.remat" in str(caught.value)


@pytest.mark.parametrize("what", [len, nn.Linear(3, 3), "forward"])
def test_it_takes_methods_of_actors(what: Any) -> None:
    with pytest.raises(TypeError, match=r"cg.remat takes a method of an actor.*checkpoint"):
        cg.remat(what)
