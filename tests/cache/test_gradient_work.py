"""Methods that work on gradients: a start knows so from the one before, and looks all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.api import step_function
from cg.launch.world.world import use_world
from cg.tracer.method import alike
from cg.tracer.method.alike import Traces

from .edited import MemoryStore

RATES = {"all": 0.1}


class Trained(torch.nn.Module):
    """A layer with an optimizer; a mode says how `update` begins."""

    mode = "optimizer"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=RATES["all"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)).square().mean()

    def update(self) -> None:
        if self.mode != "optimizer":
            self.count.add_(1)
        if self.mode != "count":
            self.optimizer.step()
            self.optimizer.zero_grad()


def start(store: MemoryStore, mode: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], int]:
    """The bits of two losses and of the state behind them, and how many graphs were begun."""
    begun: list[str] = []

    def settled(call: Any, *rest: Any) -> Any:
        begun.append(call.shown)
        return trace(call, *rest)

    trace = alike.settled
    with use_world(VirtualWorld(1)), monkeypatch.context() as patch:
        patch.setattr(step_function, "new_traces", lambda: Traces(store))
        patch.setattr(alike, "settled", settled)
        patch.setattr(Trained, "mode", mode)
        actor = cg.actor(Trained).on(0)()

        @cg.trace
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = actor.forward(x)
            cg.backward(loss)
            actor.update()
            return loss

        x = torch.linspace(-1, 1, 8).reshape(2, 4)
        numbers = [step(x), step(x), *actor.local.state_dict().values()]
        store.flush()
    bits = [value.double().sum().item().hex() for value in numbers]
    return bits, sum(shown == "Trained.update" for shown in begun)


def test_the_next_start_begins_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    first, graphs = start(store, "optimizer", monkeypatch)
    assert graphs == 1
    assert start(store, "optimizer", monkeypatch) == (first, 0)
    assert store.reasons == []


@pytest.mark.parametrize("mode", ["count", "both"])
def test_a_method_that_begins_with_something_else_is_traced(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first start has kept is of another method then."""
    store, fresh = MemoryStore(), MemoryStore()
    start(store, "optimizer", monkeypatch)
    second, graphs = start(store, mode, monkeypatch)
    assert graphs == 1
    assert second == start(fresh, mode, monkeypatch)[0]
    assert "it worked on gradients, and does not begin with that" in store.reasons
    again, _ = start(store, "optimizer", monkeypatch)
    assert again == start(MemoryStore(), "optimizer", monkeypatch)[0]
