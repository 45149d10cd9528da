"""Norms of narrow types in graphs of the fake device: their statistics have the host's types."""

from __future__ import annotations

from collections.abc import Callable

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", list(NORMS))
def test_replays_give_the_values_of_torch(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(6, CHANNELS, generator=torch.Generator().manual_seed(4)).bfloat16()
    plain = Normed(name, dtype)
    with worlds.use_world(SingleRankWorld(loose_device())):
        actor = cg.actor(Normed).on(0)(name, dtype)

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
        assert sum(s.replays for s in compiled._runtimes[0].bound[0][0].segments) > 0
