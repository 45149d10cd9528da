"""Gradients that are matrix products are added to `.grad` by the product itself."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .function_tools import trace_vjp

SIZE = 4


def whole(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers, whose products and sums are exact in every floating type."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 3 - 1).reshape(shape).to(dtype)


class Ops(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Straight(nn.Module):
    """The gradient is the product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole(SIZE, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Turned(nn.Module):
    """The gradient is the transpose of the product."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, 3)
        self.layer.weight = nn.Parameter(whole(3, SIZE))
        self.layer.bias = nn.Parameter(whole(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Odd(nn.Module):
    """The parameter's strides are not those of the product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole(3, SIZE).t())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Tied(nn.Module):
    """The gradient is a sum of products."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole(SIZE, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight) @ self.weight.t()


class Written(nn.Module):
    """A factor is written to behind the product in the user's code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole(SIZE, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        y = x.clone() @ self.weight
        return y + x.mul_(3).sum()


KINDS = (Straight, Turned, Odd, Tied, Written)


def backward(module: nn.Module, x: Tensor, times: int, adds: bool) -> Counter[str]:
    """Run the backward of a call, and say what it has run the last time."""
    traced = trace_vjp(module, "forward", (0,), (0,), x.clone().requires_grad_())
    body: Any = traced.second.only_body
    body = body.refit(None) if adds else body
    with torch.no_grad():
        out, *saved = traced.first.only_body(x)
        for _ in range(times):
            with Ops() as ops:
                body(*saved, whole(*out.shape, dtype=out.dtype))
    return ops.counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_those_of_autograd(kind: type[nn.Module], times: int, dtype: torch.dtype) -> None:
    x = whole(5, SIZE, dtype=dtype)
    found, right = kind().to(dtype), kind().to(dtype)
    backward(found, x, times, adds=True)
    for _ in range(times):
        out = right(x)
        out.backward(whole(*out.shape, dtype=dtype))
    for mine, theirs in zip(found.parameters(), right.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)
        assert mine.grad.dtype is dtype
        assert mine.grad.stride() == mine.stride()


@pytest.mark.parametrize("kind", [Straight, Turned, Odd])
def test_no_gradient_is_made_and_added(kind: type[nn.Module]) -> None:
    x = whole(5, SIZE)
    plain, adding = (backward(kind(), x, 2, adds=adds) for adds in (False, True))
    assert plain["mm"] == 2
    assert (adding["mm"], adding["addmm_"]) == (1, 1)  # that of the input stays
    assert plain["_foreach_add_"] == 1
    assert adding["_foreach_add_"] == (1 if kind is Turned else 0)  # its bias


def test_a_sum_of_products_is_added_as_before() -> None:
    assert backward(Tied(), whole(5, SIZE), 2, adds=True)["addmm_"] == 0


def test_what_was_there_is_added_to() -> None:
    module = Straight()
    held = module.weight.grad = whole(SIZE, 3) * 7
    expected = held + whole(5, SIZE).t() @ whole(5, 3)
    backward(module, whole(5, SIZE), 1, adds=True)
    assert module.weight.grad is held
    assert torch.equal(held, expected)


@pytest.mark.skipif(not hasattr(nn.Parameter, "grad_dtype"), reason="gradients of one type only")
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("kind", [Straight, Turned])
def test_gradients_of_a_type_of_their_own(kind: type[nn.Module], adds: bool) -> None:
    module = kind().to(torch.bfloat16)
    parameter = next(p for p in module.parameters() if p.ndim == 2)
    x = whole(5, SIZE, dtype=torch.bfloat16)
    traced = trace_vjp(module, "forward", (0,), (0,), x.clone().requires_grad_())
    body: Any = traced.second.only_body
    body = body.refit(None) if adds else body
    parameter.grad_dtype = torch.float32
    parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
    with torch.no_grad():
        out, *saved = traced.first.only_body(x)
        for _ in range(2):
            body(*saved, whole(*out.shape, dtype=out.dtype))
    product = x.float().t() @ whole(5, 3)
    assert parameter.grad.dtype is torch.float32
    assert torch.equal(parameter.grad, 2 * (product.t() if kind is Turned else product))


class Summed(nn.Module):
    """The gradient of the product is one number, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole(SIZE, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).sum()


@pytest.mark.parametrize("adds", [False, True])
def test_an_expanded_gradient_is_laid_out_once(adds: bool) -> None:
    module, right = Summed(), Summed()
    x = whole(5, SIZE)
    counts = backward(module, x, 1, adds=adds)
    assert counts["clone"] == 1
    right(x).backward(whole())
    assert module.weight.grad is not None
    assert right.weight.grad is not None
    assert torch.equal(module.weight.grad, right.weight.grad)
