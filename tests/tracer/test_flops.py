"""The flops of a function are those that torch's flop counter counts when it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from cg.ir.flops import Flops
from cg.ir.types import DType

from .function_tools import trace, trace_vjp


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 6, 3, padding=1)
        self.layer = nn.Linear(6, 8)
        self.weight = nn.Parameter(torch.randn(2, 8, 5))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.conv(x)).transpose(1, 2)
        return torch.bmm(self.layer(h), self.weight)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        q = (x * self.scale).view(2, 3, 5, 8)
        return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)


class Pointwise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) + x


def counted(run: Any, *values: Tensor) -> tuple[int, Any]:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        results = run(*values)
    return counter.get_total_flops(), results


class Mixed(nn.Module):
    """One product in bfloat16 and one in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(8, 4, bias=False, dtype=torch.bfloat16)
        self.wide = nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.narrow(x.bfloat16()).float())


def test_operations_are_counted_by_element_type() -> None:
    traced = trace(Mixed(), "forward", torch.randn(3, 8))
    assert traced.declaration.flops == Flops.of(
        {DType.BF16: 2 * 3 * 8 * 4, DType.F32: 2 * 3 * 4 * 2}
    )


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    """Ops of which torch's counter knows what they do, and whose first argument says nothing."""
    with torch.library._scoped_library("cg_flops", "DEF") as library:
        library.define("grouped(Tensor[] xs) -> Tensor")
        library.define("picked(Tensor index, Tensor x) -> Tensor")
        library.impl("grouped", lambda xs: xs[0] + xs[1], "CompositeExplicitAutograd")
        library.impl("picked", lambda index, x: x + 1, "CompositeExplicitAutograd")
        with mock.patch.dict(flop_registry):
            yield library


def test_the_element_type_is_that_of_the_first_factor(library: torch.library.Library) -> None:
    ops = torch.ops.cg_flops
    for op, count in ((ops.grouped, 10), (ops.picked, 200)):
        register_flop_formula(op)(lambda *args, _count=count, **kwargs: _count)

    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            narrow = ops.grouped([x.half(), x.half()])
            wide = ops.picked(torch.arange(3), x.double())
            return narrow + wide

    traced = trace(Own(), "forward", torch.randn(3))
    assert traced.declaration.flops == Flops.of({DType.F16: 10, DType.F64: 200})


CASES = [(Layers, (2, 4, 7)), (Attention, (2, 3, 5, 8)), (Pointwise, (3, 3))]


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_forward(kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    traced = trace(kind(), "forward", x)
    count, _ = counted(traced.body, x)
    assert traced.declaration.flops.total == count
    if kind is not Attention:  # which torch counts on CPUs since 2.15
        assert (count > 0) is (kind is Layers)


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_both_halves_of_a_backward(kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    traced = trace_vjp(kind(), "forward", (0,), (0,), x.clone().requires_grad_())
    count, (out, *saved) = counted(traced.first.only_body, x)
    assert traced.first.declaration.flops.total == count
    count, _ = counted(traced.second.only_body, *saved, torch.ones_like(out))
    assert traced.second.declaration.flops.total == count
    assert sum(half.declaration.flops.total for half in traced.halves) in (0, count)
