"""Shapes that follow from the values of constants, such as the keys that a causal mask shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cg
from cg.tracer.errors import TraceError

from .function_tools import assert_same_run, run_eager, run_traced, trace


class Shown(nn.Module):
    """Means over the keys that a mask shows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(len(x))
        mask = (place[:, None] >= place) & (place[:, None] % 3 != place % 3)
        return self.means(x, mask | torch.eye(len(x), dtype=torch.bool))

    def means(self, x: Tensor, mask: Tensor) -> Tensor:
        keys = self.linear(x)
        chosen = [torch.nonzero(row).flatten() for row in mask]
        return torch.stack([keys.index_select(0, i).sum(0) / i.shape[0] for i in chosen])

    def of_numbers(self, x: Tensor) -> Tensor:
        return x[torch.where(torch.tensor([True, False, True]))[0]]

    def of_masks(self, x: Tensor) -> Tensor:
        even = torch.arange(len(x)) % 2 == 0
        result = torch.zeros_like(x)
        result[even] = self.linear(x[even]).softmax(0)
        lower = torch.ones(3, 3, dtype=torch.bool).tril()
        result[even, 1:] = x[even, :2] * x[:2, [0, 2]].sum()
        return torch.cat([result, x[~even]])[:, lower[2]] * (x.T @ x)[lower].sum()

    def of_data(self, x: Tensor) -> Tensor:
        return self.means(x, x @ x.T > 0)

    def of_rounded(self, x: Tensor) -> Tensor:
        return self.means(x, torch.ones(len(x), len(x)).tril() / 3 * 3 == 1)

    def of_drawn(self, x: Tensor) -> Tensor:
        return self.means(x, torch.randint(2, (len(x), len(x))) > 0)

    def of_written(self, x: Tensor) -> Tensor:
        mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        mask[:, 0] = x[:, 0] > 0
        return self.means(x, mask)


@pytest.mark.parametrize("method", ["forward", "of_numbers", "of_masks"])
def test_they_are_those_of_plain_python(method: str) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    actors = [Shown(), Shown()]
    actors[1].load_state_dict(actors[0].state_dict())
    runs = [
        run(actor, method, (x.clone().requires_grad_(),), {}, 0)
        for run, actor in zip((run_traced, run_eager), actors, strict=True)
    ]
    assert_same_run(*runs, 1e-6)


@pytest.mark.parametrize("method", ["of_data", "of_rounded", "of_drawn", "of_written"])
def test_values_that_may_differ_are_refused(method: str) -> None:
    with pytest.raises(TraceError, match="the shape of a result depends on the values"):
        trace(Shown(), method, torch.ones(5, 3))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shown = Shown()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.shown.means(x, mask)


@cg.actor
class Layers(nn.Module):
    """Equal layers that see by different masks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(len(x))
        for number, layer in enumerate(self.layers):
            x = layer(x, (place[:, None] - place).abs() <= number)
        return x


def test_layers_with_different_masks_are_not_copies() -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    actor: Any = Layers.on(0)()  # type: ignore[attr-defined]
    step = cg.trace(lambda x: actor.forward(x))
    torch.testing.assert_close(step(x), Layers()(x))
