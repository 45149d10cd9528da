"""Trials of a memory limit share what does not change: graphs of calls, and how these are cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg
from cg.launch.api.fit_trace import Again
from cg.launch.world import world as worlds
from cg.launch.world.single_rank_world import SingleRankWorld
from cg.tracer.function.functions import Functions
from cg.tracer.function.laid_out_pieces import LayoutPlan
from cg.tracer.graph.layouts.propagation.sections import SectionCutter
from tests.backends.devices.patience import loose_device

WIDTH, ROWS, SHARE = 8, 256, 0.75


class Layer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)).square())
        return y

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class Training:
    """Some equal layers, each an actor, and their step."""

    def __init__(self, count: int, **options: Any) -> None:
        kind: Any = cg.actor(Layer).on(0, **options)
        self.layers = [kind(seed) for seed in range(count)]

        @cg.trace
        def step(x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer.forward(x)
            loss = x.square().mean()
            cg.backward(loss)
            for layer in self.layers:
                layer.update()
            return loss

        self.x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5))
        self.lowered = step.lower(self.x)

    def limited(self) -> cg.Compiled:
        """The step in a share of the memory that it takes without a limit."""
        (plan,) = self.lowered.compile(passes="-offload").memory_analysis()
        return self.lowered.compile(memory=int(SHARE * plan.peak))

    def values(self, compiled: cg.Compiled) -> list[Tensor]:
        """Losses and parameters."""
        losses = [compiled(self.x).detach().cpu() for _ in range(3)]
        parameters = (p for layer in self.layers for p in layer.local.parameters())
        return [*losses, *(p.detach().cpu() for p in parameters)]


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with worlds.use_world(SingleRankWorld(loose_device())):
        yield


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often graphs are laid out, cut and traced, and how often the step is."""
    counts: Counter[str] = Counter()
    for owner, name in (
        (LayoutPlan, "cutter"),
        (SectionCutter, "sections"),
        (Functions, "_joint"),
        (Again, "__call__"),
    ):
        original = owner.__dict__[name]

        def counted(*args: Any, _name: str = name, _original: Any = original, **kw: Any) -> Any:
            counts[_name] += 1
            return _original(*args, **kw)

        monkeypatch.setattr(owner, name, counted)
    return counts


@pytest.mark.parametrize("store", ["host", cg.whole])
def test_values_are_those_without_a_limit(store: Any) -> None:
    plain, limited = Training(3), Training(3, store=store)
    expected = plain.values(plain.lowered.compile())
    compiled = limited.limited()
    assert "computes" in compiled.memory_report
    assert all(map(torch.equal, expected, limited.values(compiled)))


def test_equal_layers_are_laid_out_once(counts: Counter[str]) -> None:
    laid_out = []
    for count in (2, 5):
        training = Training(count, store="host")
        counts.clear()
        training.limited()
        assert counts["__call__"] > 2
        laid_out.append(counts["cutter"])
    # One graph of the forward, and one of the derivative. The first layer has its own, as nothing
    # asks for the gradient of what it takes.
    assert laid_out == [4, 4]


def test_equal_layers_with_equal_limits_are_cut_once(counts: Counter[str]) -> None:
    training = Training(5, store="host")
    counts.clear()
    training.limited()
    # There are two graphs, and in a trial the limits of equal layers are at one point or the next.
    assert counts["sections"] <= 4 * counts["__call__"]


@pytest.mark.parametrize("store", ["host", cg.whole])
def test_trials_trace_no_method_again(counts: Counter[str], store: Any) -> None:
    training = Training(3, store=store)
    first = counts["_joint"]
    counts.clear()
    training.limited()
    assert counts["__call__"] > 4
    assert counts["_joint"] == first
