"""Mixtures of experts whose graphs are compiled as a whole: values, and the parts of products."""

from __future__ import annotations

import copy
import os
import shutil
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import cg
from cg.backends.fusion import fuse
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from cg.tracer.method.experts.expert_products import (
    EXPERT_LINEAR,
    EXPERT_ORDER,
    EXPERT_OUTER,
    GROUPED_MM,
)
from cg.tracer.method.experts.rows_by_expert import OWN_ROWS

WIDTH, EXPERTS, TOKENS = 8, 4, 6


@cg.actor
class Experts(nn.Module):
    """A router and a gated product; `writes` has rows written between two products."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(0.3 * torch.randn(EXPERTS, 2 * WIDTH, WIDTH))
        self.down = nn.Parameter(0.3 * torch.randn(EXPERTS, WIDTH, WIDTH))
        self.writes = writes
        self.double()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def loss(self, x: Tensor) -> Tensor:
        shares, ids = self.router(x).softmax(-1).topk(2)
        gate, h = cg.expert_linear(x, self.up, ids).chunk(2, -1)
        if self.writes:
            rows, up = x.detach().clone(), self.up.detach()
            first = cg.expert_linear(rows, up, ids)
            rows.mul_(2)
            gate = gate + (first + cg.expert_linear(rows, up, ids)).chunk(2, -1)[0]
        h = cg.expert_linear(functional.silu(gate) * h, self.down, ids)
        return (x + (h * shares.unsqueeze(-1)).sum(1)).square().mean()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def losses_of(actor: Any, compiler: str | None) -> list[float]:
    @cg.trace
    def step(x: Tensor) -> Tensor:
        loss = actor.loss(x)
        cg.backward(loss)
        actor.update()
        return loss

    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    compiled = step.lower(x).compile(fuse=compiler)
    return [float(compiled(x)) for _ in range(3)]


def plain_losses(writes: bool) -> list[float]:
    """In one process, by autograd."""
    actor: Any = copy.deepcopy(Experts(writes))
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    losses = []
    for _ in range(3):
        loss = actor.loss(x)
        loss.backward()
        actor.update()
        losses.append(loss.item())
    return losses


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """A compiler called `graph`, which runs the graph; the graphs that it takes."""
    taken: list[torch.fx.GraphModule] = []

    def compiler(module: torch.fx.GraphModule, examples: Any) -> Any:
        taken.append(module)
        return lambda values: module(*values)

    monkeypatch.setitem(fuse.FUSERS, "graph", lambda: compiler)
    return taken


@pytest.mark.parametrize("writes", [False, True])
def test_products_share_an_order(graphs: list[torch.fx.GraphModule], writes: bool) -> None:
    with use_world(VirtualWorld(1)):
        losses = losses_of(Experts.on(0)(writes), "graph")
    torch.testing.assert_close(losses, plain_losses(writes), rtol=1e-12, atol=0)
    counts = [Counter(node.target for node in module.graph.nodes) for module in graphs]
    assert not any(c[EXPERT_LINEAR] or c[EXPERT_OUTER] for c in counts)
    assert [c[EXPERT_ORDER] for c in counts if c[GROUPED_MM]] == [1, 1]


@pytest.mark.parametrize("axes", [{"ep": 2}, {"dp": 2}, {"dp": 2, "ep": 2}])
def test_experts_of_other_ranks_are_zeros(
    graphs: list[torch.fx.GraphModule], axes: dict[str, int]
) -> None:
    plan = {"loss(x)": cg.cut(0, *axes)}
    if "ep" in axes:
        plan["up|down"] = cg.cut(0, "ep")
    with use_world(VirtualWorld(2 * len(axes))):
        losses = losses_of(Experts.on(cg.mesh(**axes), plan=plan)(), "graph")
    torch.testing.assert_close(losses, plain_losses(False), rtol=1e-12, atol=0)
    targets = [node.target for module in graphs for node in module.graph.nodes]
    assert (OWN_ROWS if "ep" in axes else EXPERT_ORDER) in targets


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler for TorchInductor"
)
def test_inductor_fuses_them() -> None:
    with use_world(VirtualWorld(2)):
        plan = {"up|down": cg.cut(0, "ep"), "loss(x)": cg.cut(0, "ep")}
        losses = losses_of(Experts.on(cg.mesh(ep=2), plan=plan)(), "inductor")
    torch.testing.assert_close(losses, plain_losses(False), rtol=1e-12, atol=0)
