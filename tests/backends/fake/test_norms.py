"""Norms in graphs of the fake device: statistics of the host's types, and those of a batch norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg
from cg.launch.world import world as worlds
from cg.launch.world.single_rank_world import SingleRankWorld
from tests.backends.devices.patience import loose_device

CHANNELS = 8
NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.LayerNorm(CHANNELS),
    "layer without weight": lambda: nn.LayerNorm(CHANNELS, elementwise_affine=False),
    "group": lambda: nn.GroupNorm(2, CHANNELS),
}


class Normed(nn.Module):
    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(CHANNELS, CHANNELS).to(torch.bfloat16)
        self.norm = NORMS[name]().to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)).float().square().mean()  # type: ignore[no-any-return]


class Made(nn.Module):
    """A model that a function makes."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.model = make()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]


class BatchNormed(nn.Module):
    """Two batch norms, which give new values and write their statistics; the first has no gradient
    of what it takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.ahead, self.behind = nn.BatchNorm1d(CHANNELS), nn.BatchNorm1d(CHANNELS)
        self.first = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.behind(self.first(self.ahead(x)))
        return h.sin().square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", list(NORMS))
def test_replays_give_the_values_of_torch(name: str, dtype: torch.dtype) -> None:
    replays_equal_torch(lambda: Normed(name, dtype), torch.bfloat16)


def test_replays_of_batch_norms_give_the_values_of_torch() -> None:
    replays_equal_torch(BatchNormed, torch.float32)


def replays_equal_torch(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    """Train on the fake device and in plain torch, with an input of a type; compare the bits."""
    x = torch.randn(6, CHANNELS, generator=torch.Generator().manual_seed(4)).to(dtype)
    plain = make()
    with worlds.use_world(SingleRankWorld(loose_device())):
        actor: Any = cg.actor(Made).on(0)(make)

        @cg.trace
        def step(x: Tensor) -> Tensor:
            loss = actor.forward(x)
            cg.backward(loss)
            return loss

        compiled = step.lower(x).compile()
        for _ in range(4):
            plain.zero_grad()
            actor.local.zero_grad()
            expected = plain(x)
            expected.backward()
            assert torch.equal(compiled(x).cpu(), expected.detach())
            for mine, its in zip(actor.local.parameters(), plain.parameters(), strict=True):
                assert mine.grad is not None
                assert its.grad is not None
                assert torch.equal(mine.grad.cpu(), its.grad)
            for mine, its in zip(actor.local.buffers(), plain.buffers(), strict=True):
                assert torch.equal(mine.cpu(), its)
        assert sum(s.replays for s in compiled._runtimes[0].bound[0][0].segments) > 0
