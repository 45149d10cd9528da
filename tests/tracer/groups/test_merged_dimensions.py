"""Two cut dimensions that a method views as one, where ranks exchange something."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from cg.tracer.errors import TraceError

HEADS, D = 4, 3
X = torch.randn(6, D, generator=torch.Generator().manual_seed(0))


@cg.actor
class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(HEADS, D))
        self.first = nn.Parameter(torch.randn(D, 2))
        self.second = nn.Parameter(torch.randn(2, HEADS * D))
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows and heads are one dimension, before the heads' sum and behind it."""
        each = self.joined(x)
        total = each.view(-1, HEADS, D).sum(1, keepdim=True)
        scaled = each * total.square().expand(-1, HEADS, -1).reshape(-1, D)
        return scaled.view(-1, HEADS, D).sum(1)

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, None] * self.weight).flatten(0, 1).tanh()

    def scattered(self, x: torch.Tensor) -> torch.Tensor:
        total = (x @ self.first @ self.second).view(-1, D)
        return (self.joined(x) * total).view(-1, HEADS, D).sum(1)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def on_a_mesh() -> cg.ActorHandle:
    plan = {
        "forward(x)|joined(x)|scattered(x)": cg.cut(0, "dp"),
        "weight|second": cg.cut(0, "tp"),
        "first": cg.cut(1, "tp"),
    }
    handle: cg.ActorHandle = Heads.on(cg.mesh(dp=2, tp=2), plan=plan)()
    return handle


@pytest.mark.parametrize("rows", [6, 5])
def test_they_go_from_part_to_part_as_factors(rows: int) -> None:
    """From before the exchange to behind it, and from the forward to the backward."""
    x = X[:rows]
    with use_world(VirtualWorld(4)):
        actor = on_a_mesh()

        @cg.trace
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = actor.forward(x).square().mean()
            cg.backward(loss)
            actor.update()
            return loss

        lowered = step.lower(x)
        assert f"f32[{rows}/dp,{HEADS}/tp,{D}]" in lowered.as_text()
        compiled = lowered.compile()
        found = [compiled(x) for _ in range(3)]
    one = Heads()
    for loss in found:
        right = one.forward(x).square().mean()
        right.backward()
        one.update()
        torch.testing.assert_close(loss, right.detach())


@pytest.mark.parametrize("rows", [6, 5])
def test_they_are_exchanged_as_factors(rows: int) -> None:
    x = X[:rows]
    with use_world(VirtualWorld(4)):
        actor = on_a_mesh()

        @cg.trace
        def step(x: torch.Tensor) -> torch.Tensor:
            scattered: torch.Tensor = actor.scattered(x)
            return scattered

        torch.testing.assert_close(step(x), Heads().scattered(x))


def test_no_type_has_them() -> None:
    with use_world(VirtualWorld(4)):
        actor = on_a_mesh()

        @cg.trace
        def step(x: torch.Tensor) -> torch.Tensor:
            joined: torch.Tensor = actor.joined(x)
            return joined

        message = "is an output, and a dimension of it is cut"
        with pytest.raises(TraceError, match=message) as caught:
            step.lower(X)
    assert "return it without viewing" in str(caught.value)
    assert f"{__file__}:" in str(caught.value)
