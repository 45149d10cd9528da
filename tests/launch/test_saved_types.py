"""`compile(saved="bf16")`: saved activations are rounded to bfloat16, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.ir.types import DType
from cg.launch.world.world import use_world

from ..stages import mean_loss

WIDTH = 32


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, dtype=dtype)
        self.down = nn.Linear(4 * WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))


def trained(dtype: torch.dtype, schedule: str = "1f1b", **options: Any) -> tuple[Any, list[Tensor]]:
    """A compiled step of two ranks, its loss and its gradients."""
    with use_world(VirtualWorld(2)):
        layers = [cg.actor(Layer).on(rank)(dtype) for rank in range(2)]

        @cg.trace
        def step(x: Tensor) -> Tensor:
            return mean_loss(layers, x, 4)

        x = torch.randn(64, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(3))
        options["schedule"] = cg.schedules.by_name(schedule)
        compiled = step.lower(x).compile(**options)
        values = [compiled(x)]
        values += [p.grad for layer in layers for p in layer.local.parameters()]
    return compiled, values


def by_hooks() -> list[Tensor]:
    """The same gradients by torch's hooks, which round what the layers compute inside."""
    layers = [Layer(torch.float32) for _ in range(2)]
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3))
    losses = []
    for part in x.chunk(4):
        for layer in layers:
            up = layer.up(part)
            with saved_tensors_hooks(lambda t: t.to(torch.bfloat16), lambda t: t.float()):
                hidden = functional.gelu(up)
            weight, bias = layer.down.weight, layer.down.bias
            part = part + _Product.apply(hidden, weight, bias)
        losses.append(part.square().mean())
    loss = torch.stack(losses).mean()
    loss.backward()
    return [loss.detach(), *(p.grad for layer in layers for p in layer.parameters())]


class _Product(torch.autograd.Function):
    """A linear layer that saves its operand in bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x.to(torch.bfloat16), weight)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x.float(), grad.sum(0)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_gradients_are_those_of_rounded_activations(schedule: str) -> None:
    plain, exact = trained(torch.float32, schedule)
    compiled, values = trained(torch.float32, schedule, saved="bf16")
    assert torch.equal(values[0], exact[0])  # the forward is exact
    assert not all(map(torch.equal, values, exact))
    for mine, right in zip(values, by_hooks(), strict=True):
        assert torch.allclose(mine, right, rtol=1e-5, atol=1e-7)
    less, more = (sum(plan.peak for plan in c.memory_analysis()) for c in (compiled, plain))
    assert less < more
    assert "rounded to bfloat16" in compiled.memory_report


def test_what_is_small_already_stays() -> None:
    plain, exact = trained(torch.bfloat16)
    compiled, values = trained(torch.bfloat16, saved="bf16")
    assert all(map(torch.equal, values, exact))
    assert [p.peak for p in plain.memory_analysis()] == [p.peak for p in compiled.memory_analysis()]


def test_a_limit_goes_with_it() -> None:
    compiled, values = trained(torch.float32, saved="bf16")
    peak = max(plan.peak for plan in compiled.memory_analysis())
    limited, same = trained(torch.float32, saved="bf16", memory=int(0.9 * peak))
    assert max(plan.peak for plan in limited.memory_analysis()) <= 0.9 * peak
    assert torch.equal(values[0], same[0])
    assert "of the forward again" in limited.memory_report
    assert "rounded to bfloat16" in limited.memory_report


def test_inputs_and_outputs_are_exact() -> None:
    compiled, _ = trained(torch.float32, saved="bf16")
    functions = compiled.module.functions
    names = [n for n in functions if n.startswith("layer") and n.endswith("vjp.forward")]
    forward = functions[names[0]]
    types = {str(t): t.dtype for t in forward.outputs}
    assert types == {"f32[16,32]": DType.F32, "bf16[16,128]": DType.BF16}


def test_another_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"saved='fp8': None, to save tensors as they are, or"):
        trained(torch.float32, saved="fp8")
