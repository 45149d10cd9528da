"""Large gradients are added to `.grad` as soon as they are there, and are what they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cg.tracer.graph.codegen import codegen

from .function_tools import trace_vjp

WIDTH = 32


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Tied(nn.Module):
    """A weight whose gradient is a sum, and one that is part of another result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.other = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) @ self.weight.t() + (x + self.other)


class Watch(TorchDispatchMode):
    """How many parameters have a gradient, at each product."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.parameters = list(module.parameters())
        self.counts: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.counts.append(sum(p.grad is not None for p in self.parameters))
        return func(*args, **(kwargs or {}))


X = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))


def run(module: nn.Module, times: int = 1) -> tuple[list[Tensor], list[int]]:
    traced = trace_vjp(module, "forward", (0,), (0,), X.clone().requires_grad_())
    with torch.no_grad():
        out, *saved = traced.first.only_body(X)
        with Watch(module) as watch:
            for _ in range(times):
                (cotangent,) = traced.second.only_body(*saved, torch.ones_like(out))
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return [cotangent, *gradients], watch.counts


@pytest.mark.parametrize("kind", [Layers, Tied])
@pytest.mark.parametrize("times", [1, 2])
def test_they_are_the_same_bits(
    kind: type[nn.Module], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, _ = run(kind(), times)
    monkeypatch.setattr(codegen, "LARGE", 1)
    found, _ = run(kind(), times)
    assert len(found) == len(right) > 1
    assert all(map(torch.equal, found, right))
    plain, x = kind(), X.clone().requires_grad_()
    for _ in range(times):
        plain(x).sum().backward()
    torch.testing.assert_close(
        found[1:], [p.grad for p in plain.parameters() if p.grad is not None]
    )


def test_they_do_not_wait_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    _, together = run(Layers())
    assert set(together) == {0}
    monkeypatch.setattr(codegen, "LARGE", WIDTH * WIDTH)
    _, found = run(Layers())
    assert found == sorted(found)
    assert found[-1] >= 2


def test_what_a_parameter_gets_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codegen, "LARGE", 1)
    module = Tied()
    values, _ = run(module)
    storages = [v.untyped_storage().data_ptr() for v in values]
    assert len(set(storages)) == len(storages)
