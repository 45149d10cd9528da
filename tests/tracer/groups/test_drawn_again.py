"""What draws random numbers is computed again, with the numbers that it has drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import cg

from ...sampling import examples
from ...worlds import virtual_world

WIDTH = 4
LAYERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "linear": lambda m, x: m.down(torch.tanh(m.up(x))),
    "dropout": lambda m, x: functional.dropout(x, 0.4),
    "dropout in the middle": lambda m, x: m.down(functional.dropout(torch.tanh(m.up(x)), 0.25)),
    "dropout in place": lambda m, x: functional.dropout(x * 2, 0.4, inplace=True),
    "fused dropout": lambda m, x: torch.native_dropout(x, 0.4, True)[0] * 2,
    "dropout of channels": lambda m, x: functional.dropout1d(x[:, None], 0.5)[:, 0],
    "noise": lambda m, x: x * torch.rand_like(x) + torch.randn_like(x),
    "noise in place": lambda m, x: x * torch.empty_like(x).uniform_(0.5, 1.0),
    "noise that changes": lambda m, x: _noisy(x),
}


def _noisy(x: Tensor) -> Tensor:
    noise = torch.rand_like(x)
    first = (noise > 0.5).to(x.dtype)
    noise.mul_(2).add_(1)
    return x * noise * (1 + first)


@cg.actor
class Drawing(nn.Module):
    """Draws, then calls layers that draw, then draws again.

    Args:
        again: whether checkpoints compute the layers again.
        layers: their names.
    """

    def __init__(self, again: bool, *layers: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.double()
        self.again, self.layers = again, layers

    def all_layers(self, names: tuple[str, ...], x: Tensor) -> Tensor:
        for name in names:
            x = LAYERS[name](self, x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(x, 0.2)
        for names in self.layers, self.layers[::-1]:
            run = partial(self.all_layers, names)
            x = checkpoint(run, x, use_reentrant=False) if self.again else run(x)
        return (functional.dropout(x, 0.2) @ self.down.weight).square().sum()


PLAN = {
    "forward(x)": cg.cut(0, "dp"),
    "up.*": cg.cut(0, "tp"),
    "down.weight": cg.cut(1, "tp"),
}
PLACES: dict[str, Callable[[], Any]] = {
    "one": lambda: Drawing.on(0),  # type: ignore[attr-defined]
    "dp": lambda: Drawing.on(cg.mesh(dp=3, tp=1), plan=PLAN),  # type: ignore[attr-defined]
    "dp-tp": lambda: Drawing.on(cg.mesh(dp=2, tp=2), plan=PLAN),  # type: ignore[attr-defined]
    "stored": lambda: Drawing.on(  # type: ignore[attr-defined]
        cg.mesh(dp=2, tp=1), plan=PLAN, store=cg.cut(0, "dp")
    ),
}

_world = virtual_world(4)


def trained(place: str, how: str, layers: tuple[str, ...], rows: int) -> list[list[Tensor]]:
    """The loss, and the gradients on each rank, of two executions."""
    actor = PLACES[place]()(how == "checkpoint", *layers)
    forward = cg.remat(actor.forward) if how == "remat" else actor.forward

    def step(x: Tensor) -> Tensor:
        loss: Tensor = forward(x)
        cg.backward(loss)
        return loss

    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    compiled = cg.trace(step).lower(x).compile(seed=7)
    made = []
    for _ in range(2):
        made.append([compiled(x)])
        instances = [actor.local] if place == "one" else actor.instances.values()
        made[-1] += [
            p.grad.clone() for one in instances for p in one.parameters() if p.grad is not None
        ]
    return made


@pytest.mark.grid(1)
@pytest.mark.parametrize("how", ["checkpoint", "remat"])
@pytest.mark.parametrize("place", PLACES)
@given(data=st.data())
@examples(8)
def test_values_are_those_without_recomputation(place: str, how: str, data: st.DataObject) -> None:
    names = st.sampled_from(list(LAYERS))
    layers = tuple(data.draw(st.lists(names, min_size=1, max_size=4)))
    rows = data.draw(st.integers(2, 5))
    found, expected = (trained(place, each, layers, rows) for each in (how, "none"))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.grid(1)
@pytest.mark.parametrize("place", ["one", "dp-tp"])
@pytest.mark.parametrize("layer", LAYERS)
def test_each_draw_in_a_checkpoint_and_by_remat(place: str, layer: str) -> None:
    expected = trained(place, "none", (layer, "linear"), 3)
    for how in "checkpoint", "remat":
        found = trained(place, how, (layer, "linear"), 3)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", ["checkpoint", "remat"])
def test_a_backward_draws_nothing_and_takes_less(how: str) -> None:
    layers = ("linear", "dropout", "linear")
    kept: Counter[str] = Counter()
    for each in how, "none":
        actor = PLACES["one"]()(each == "checkpoint", *layers)
        forward = cg.remat(actor.forward) if each == "remat" else actor.forward
        step = cg.trace(lambda x, forward=forward: cg.backward(forward(x)))
        module = step.lower(torch.ones(3, WIDTH).double()).trace.module
        backward = next(f for n, f in module.functions.items() if n.endswith("vjp.backward"))
        assert not backward.random
        kept[each] = len(backward.inputs)
    assert kept[how] < kept["none"]
