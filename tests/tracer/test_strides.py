"""Results whose real strides are not those of their fakes are laid out as the trace has them."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn import functional

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from cg.tracer.graph.codegen.bodies import GraphBody

from .function_tools import check_equal, trace, trace_vjp

X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()


@torch.library.custom_op("cg_tests::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """Twice the tensor, which lies in memory with its last two dimensions exchanged."""
    return (x * 2).transpose(-1, -2).contiguous().transpose(-1, -2)


@turned.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


def _turned_backward(context: Any, gradient: Tensor) -> Tensor:
    return turned(gradient)


turned.register_autograd(_turned_backward)


class Layer(nn.Module):
    def __init__(self, call: Callable[[Tensor], Any] = turned) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.call = nn.Parameter(torch.randn(4, 4)), call

    def forward(self, x: Tensor) -> Any:
        return self.call(x @ self.weight)


def ways(turned: Callable[[Tensor], Tensor]) -> dict[str, Callable[[Tensor], Any]]:
    """Ways to use the result of an operator."""
    return {
        "softplus": lambda x: functional.softplus(x).transpose(1, 2).contiguous().cumsum(-1),
        "viewed": lambda x: turned(x).view(-1),
        "viewed in parts": lambda x: turned(x).transpose(0, 1)[1:].transpose(0, 1).view(2, -1),
        "strided": lambda x: turned(x).as_strided((2, 3), (12, 4)),
        "returned": lambda x: turned(x),
        "returned and viewed": lambda x: (lambda y: (y, y.view(-1)))(turned(x)),
        "written in place": lambda x: turned(x).mul_(3).view(-1),
        "one of several": lambda x: turned(x).split(1, -1)[1].view(-1),
        "as it lies": lambda x: (turned(x) * 2).sum(),
    }


WAYS, DENSE = ways(turned), ways(lambda x: x * 2)


@pytest.mark.parametrize("name", ["softplus", "returned", "as it lies"])
def test_values_and_gradients_are_those_of_plain_python(name: str) -> None:
    check_equal(Layer(WAYS[name]), "forward", X)


@pytest.mark.parametrize("name", WAYS)
def test_a_body_gives_what_its_trace_says(name: str) -> None:
    body = trace(Layer(WAYS[name]), "forward", X).body
    assert isinstance(body, GraphBody)
    for _ in range(2):
        found = body.run(X.detach())
        expected = [*pytree.tree_leaves(DENSE[name](X.detach() @ Layer().weight.detach()))]
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.is_contiguous()
            torch.testing.assert_close(ours, theirs)


def source_of(body: Any) -> str:
    return "".join(linecache.getlines(body.run.__code__.co_filename))


def test_nothing_is_compared_after_the_first_run() -> None:
    body: Any = trace(Layer(lambda x: torch.relu(x).view(-1)), "forward", X).body
    assert "COMPARE" in source_of(body)
    body.run(X.detach())
    assert "COMPARE" not in source_of(body)
    assert "LAID_OUT" not in source_of(body)


def test_what_differs_is_laid_out_in_every_run() -> None:
    body: Any = trace(Layer(WAYS["viewed"]), "forward", X).body
    run = body.run
    run(X.detach())
    assert source_of(body).count("LAID_OUT") == 1
    assert "COMPARE" not in source_of(body)
    assert body.run is run


def test_a_failure_before_the_end_of_the_first_run_leaves_the_comparison_in_place() -> None:
    body: Any = trace(Layer(WAYS["viewed"]), "forward", X).body
    with pytest.raises(RuntimeError):
        body.run(torch.zeros(2, 3, 5))
    assert "COMPARE(" in source_of(body)
    body.run(X.detach())
    assert "LAID_OUT" in source_of(body)


def test_a_backward_is_laid_out_as_well() -> None:
    vjp = trace_vjp(Layer(WAYS["softplus"]), "forward", (0,), (0,), X)
    (_, *saved) = vjp.first.only_body(X.detach())
    for _ in range(2):
        (gradient,) = vjp.second.only_body(*saved, torch.ones(2, 4, 3))
    assert gradient.is_contiguous()


@cg.actor
class StridedStage(Layer):
    """A layer with a loss."""

    def loss(self, x: Tensor) -> Tensor:
        return self.forward(x).square().mean()


@pytest.mark.parametrize("call", [WAYS["softplus"], turned], ids=["softplus", "turned"])
def test_a_pipeline_sends_what_lies_in_another_way(call: Any) -> None:
    with use_world(VirtualWorld(2)):
        stages = [StridedStage.on(rank)(call) for rank in range(2)]  # type: ignore[attr-defined]

        @cg.trace
        def step(x: Tensor) -> Tensor:
            h = stages[0].forward(x)
            loss = stages[1].loss(h.transpose(1, 2) if call is not turned else h)
            cg.backward(loss)
            return loss

        first, second = Layer(call), Layer(call)
        for _ in range(2):
            loss = step(X.detach())
            h = first(X.detach())
            expected = second(h.transpose(1, 2) if call is not turned else h).square().mean()
            expected.backward()
            torch.testing.assert_close(loss, expected.detach())
        for stage, layer in zip(stages, (first, second), strict=True):
            torch.testing.assert_close(stage.local.weight.grad, layer.weight.grad)
