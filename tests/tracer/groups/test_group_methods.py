"""What methods of actors on meshes may take, give and do; each as in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

ROWS = cg.cut(0, "dp")
X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    with use_world(VirtualWorld(4)):
        yield


@cg.actor
class Layer(nn.Module):
    """A layer with methods that give no tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()

    def nothing(self, x: Tensor) -> None:
        x @ self.weight.t()

    def sizes(self, x: Tensor) -> dict[str, Any]:
        return {"rows": x.shape[0], "rate": 0.5}

    def number(self) -> int:
        return self.weight.shape[0]

    def draws(self, x: Tensor) -> None:
        torch.rand_like(x)


@pytest.mark.parametrize("store", [cg.whole, ROWS], ids=["whole", "stored"])
def test_methods_that_give_no_tensor(store: Any) -> None:
    arguments = "forward(x)|nothing(x)|sizes(x)|draws(x)"
    plan = {arguments: ROWS, "weight": cg.cut(0, "tp")}
    actor, plain = Layer.on(cg.mesh(dp=2, tp=2), plan=plan, store=store)(), Layer()  # type: ignore[attr-defined]

    @cg.trace
    def step(x: Tensor) -> Any:
        h = actor.forward(x)
        gone = actor.nothing(x), actor.nothing(h), actor.draws(h)
        cg.backward(h.sum())
        return h, gone, actor.sizes(h), actor.number()

    h, gone, sizes, number = step(X)
    torch.testing.assert_close(h, plain.forward(X).detach())
    assert (gone, sizes, number) == ((None, None, None), plain.sizes(X), 6)
