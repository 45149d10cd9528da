"""The halves of a backward compute what the whole does, bit for bit; and recomputation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cg.ir.attributes import Effect
from cg.ir.types import TensorType
from cg.tracer.errors import TraceError
from cg.tracer.function.functions import Functions
from cg.tracer.values.interface import MethodTarget, TracedVjp

from .function_tools import cotangents, signature, trace, trace_vjp
from .test_functions import rand
from .test_partition import CASES

pytestmark = pytest.mark.timeout(120)


class Scale(torch.autograd.Function):
    """Its backward writes in place to what the gradient of the weight has read before."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        product = grads[0] * x
        gradient = product.sum(0)
        product.mul_(0.0)
        return product.add_(grads[0] * weight), gradient


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Scale.apply(self.linear(x), self.weight)
        return result[[0, 2, 2, 1]] * self.linear.bias[[1, 1, 3, 0, 0, 2, 4, 5]]


class Tied(nn.Module):
    """One weight in two places, whose gradients are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) @ self.weight.T


class Ignored(nn.Module):
    """The second input has no influence, so its gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + torch.zeros_like(y)


class Biased(nn.Module):
    """Nothing can be put off: the gradient of the bias is the cotangent."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() + self.bias


MORE: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    **CASES,
    "in place": (InPlace, (rand(4, 8),)),
    "one weight twice": (Tied, (rand(5, 8),)),
    "ignored input": (Ignored, (rand(5, 8), rand(5, 8))),
    "nothing to put off": (Biased, (rand(5, 8),)),
    "group norm": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 3, bias=False)
        ),
        (rand(2, 3, 9, 9),),
    ),
}
WHOLE = {"nothing to put off"}


def make_vjp(actor: nn.Module, inputs: tuple[torch.Tensor, ...], remat: bool = False) -> TracedVjp:
    count = len(trace(actor, "forward", *inputs).declaration.outputs)
    needed = tuple(i for i, x in enumerate(inputs) if x.requires_grad)
    target = MethodTarget("actor", actor, "forward", remat)
    outputs = tuple(range(count))
    return Functions().trace_vjp(target, signature(*inputs), "f.vjp", outputs, needed, None)


def run(
    vjp: TracedVjp, actor: nn.Module, inputs: tuple[torch.Tensor, ...], halves: bool
) -> tuple[list[Any], dict[str, torch.Tensor | None]]:
    """Gradients of inputs and of parameters; each is made twice, so that they add up."""
    found: list[Any] = []
    for seed in range(2):
        torch.manual_seed(seed)
        result = list(vjp.first.only_body(*[x.detach() for x in inputs]))
        saved = len(vjp.second.declaration.inputs) - len(vjp.vjp.grad_outputs)
        cut = len(result) - saved
        given = result[cut:] + cotangents([result[i] for i in vjp.vjp.grad_outputs])
        if not halves:
            found += list(vjp.second.only_body(*given))[: len(vjp.vjp.grad_inputs)]
            continue
        bodies = {half.declaration.name: half.body for half in vjp.halves}
        left: list[Any] = []
        if vjp.vjp.input is not None:
            made = list(bodies[vjp.vjp.input](*given))
            count = len(vjp.vjp.grad_inputs)
            found += made[:count]
            left = made[count:]
        weight = bodies.get(vjp.vjp.weight or "", vjp.second.only_body)
        assert list(weight(*[given[i] for i in vjp.vjp.kept], *left)) == [None]
    grads = {name: p.grad for name, p in actor.named_parameters()}
    for parameter in actor.parameters():
        parameter.grad = None
    return found, grads


@pytest.mark.parametrize("case", MORE)
def test_the_halves_compute_what_the_whole_does(case: str) -> None:
    make, inputs = MORE[case]
    actor = make()
    before = copy.deepcopy(actor.state_dict())
    vjp = make_vjp(actor, inputs)
    assert (vjp.vjp.weight is None) == (case in WHOLE)
    if vjp.vjp.weight is None:
        return
    whole, whole_grads = run(vjp, actor, inputs, halves=False)
    actor.load_state_dict(before)
    parts, part_grads = run(vjp, actor, inputs, halves=True)
    assert len(whole) == len(parts)
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(a, b)
    for name, grad in whole_grads.items():
        other = part_grads[name]
        assert (grad is None) == (other is None), name
        if grad is not None and other is not None:
            assert torch.equal(grad, other), name
            assert grad.stride() == other.stride()


def matmuls(body: Any) -> int:
    names = [str(node.target) for node in body.graph_and_lines()[0].nodes]
    return sum(name.startswith(("aten.mm", "aten.addmm", "aten.bmm")) for name in names)


def test_nothing_is_computed_twice() -> None:
    make, inputs = CASES["block"]
    vjp = make_vjp(make(), inputs)
    first, second = (half.body for half in vjp.halves)
    assert matmuls(first) == matmuls(second) == 4
    assert matmuls(vjp.second.only_body) == 8
    assert [half.declaration.effect for half in vjp.halves] == [Effect.ACCUMULATE] * 2


def test_what_is_left_is_no_more_than_what_it_takes() -> None:
    """A value that the second half has already, or can take a view of, is not handed on."""
    make, inputs = CASES["mlp"]
    vjp = make_vjp(make(), inputs)
    first, second = (half.declaration for half in vjp.halves)
    left = first.outputs[1:]
    assert [t.shape for t in left if isinstance(t, TensorType)] == [(2, 6, 64)]
    assert second.inputs == tuple(vjp.second.declaration.inputs[i] for i in vjp.vjp.kept) + left
    assert len(vjp.vjp.kept) == 3  # the input of each layer, and the cotangent


def test_a_convolution_is_in_both_halves_with_its_part_of_the_mask() -> None:
    make, inputs = CASES["convolution"]
    vjp = make_vjp(make(), inputs)
    masks = [
        [
            list(n.args[-1])
            for n in half.body.graph_and_lines()[0].nodes
            if "convolution_backward" in str(n.target)
        ]  # type: ignore[attr-defined]
        for half in vjp.halves
    ]
    assert masks == [[[True, False, False]] * 2, [[False, True, True]] * 2]


def test_without_an_input_gradient_all_is_put_off() -> None:
    make, inputs = CASES["tied"]
    vjp = make_vjp(make(), inputs)
    assert vjp.vjp.weight == vjp.second.declaration.name
    assert vjp.vjp.input is None
    assert vjp.halves == ()
    assert vjp.vjp.kept == tuple(range(len(vjp.second.declaration.inputs)))


def test_without_trained_parameters_nothing_is_put_off() -> None:
    net = nn.Linear(8, 4).requires_grad_(False)
    assert trace_vjp(net, "forward", (0,), (0,), rand(5, 8)).vjp.weight is None


@pytest.mark.grid(1)
@pytest.mark.parametrize("case", sorted(MORE.keys() - {"dropout", "convolution"}))
@pytest.mark.parametrize("halves", [False, True])
def test_recomputing_saves_inputs_alone_and_is_exact(case: str, halves: bool) -> None:
    make, inputs = MORE[case]
    actor = make()
    kept = run(make_vjp(actor, inputs), actor, inputs, halves=False)
    vjp = make_vjp(actor, inputs, remat=True)
    given = [x.detach() for x in inputs]
    count = (
        len(vjp.first.declaration.outputs)
        - len(vjp.second.declaration.inputs)
        + len(vjp.vjp.grad_outputs)
    )
    assert all(any(value is x for x in given) for value in vjp.first.only_body(*given)[count:])
    if halves and vjp.vjp.weight is None:
        return
    again = run(vjp, actor, inputs, halves)
    for a, b in zip([*kept[0], *kept[1].values()], [*again[0], *again[1].values()], strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def test_what_cannot_be_recomputed() -> None:
    make, inputs = CASES["convolution"]
    with pytest.raises(
        TraceError, match=r"cannot be computed again.*changes the actor's"
    ) as caught:
        make_vjp(make(), inputs, remat=True)
    assert "cg.remat" in str(caught.value)
