"""Hooks on the gradients of parameters: refused wherever their actor is, and what does their work.

A hook would see the gradient of each microbatch on each rank. Plain PyTorch calls it with that of
the batch, once a backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge, register_multi_grad_hook

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world
from cg.tracer.errors import TraceError


def node_of(parameter: nn.Parameter) -> Node:
    """The node that adds up a gradient; its hooks live as long as somebody holds it."""
    HELD.append(get_gradient_edge(parameter).node)
    return HELD[-1]


HELD: list[Node] = []
HOOKS: dict[str, Callable[[nn.Parameter], Any]] = {
    "of the tensor": lambda p: p.register_hook(lambda gradient: gradient * 2),
    "behind the sum": lambda p: p.register_post_accumulate_grad_hook(lambda _: None),
    "of several": lambda p: register_multi_grad_hook([p], lambda _: None),
    "of the node": lambda p: node_of(p).register_hook(lambda *_: None),
    "ahead of the node": lambda p: node_of(p).register_prehook(lambda *_: None),
}


class Stage(nn.Module):
    """A layer with an optimizer for each parameter, called by `update` or by hooks."""

    def __init__(self, hook: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        if hook is not None:
            HOOKS[hook](self.linear.weight)
        self.optimizers = [torch.optim.Adam([p], lr=0.1) for p in self.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))

    def loss(self, x: Tensor) -> Tensor:
        return self.forward(x).square().mean()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


ROWS = {"loss(x)|forward(x)": cg.cut(0, "dp")}
PLACES: dict[str, Callable[[Any], list[Any]]] = {
    "another rank": lambda make: [make.on(1)],
    "a pipeline": lambda make: [make.on(0), make.on(1)],
    "dp": lambda make: [make.on(cg.mesh(dp=2), plan=ROWS)],
    "pieces along dp": lambda make: [
        make.on(cg.mesh(dp=2), plan=ROWS, store=cg.cut(0, "dp")),
    ],
    "tp": lambda make: [make.on(cg.mesh(tp=2), plan={"linear.*": cg.cut(0, "tp")})],
}


def step_of(stages: list[Any]) -> Any:
    @cg.trace
    def step(x: Tensor) -> Tensor:
        losses = []
        for rows in cg.microbatches(x, 2):
            h = rows
            for stage in stages[:-1]:
                h = stage.forward(h)
            losses.append(stages[-1].loss(h))
        loss = cg.mean(losses)
        cg.backward(loss)
        for stage in stages:
            stage.update()
        return loss

    return step


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_the_constructor_are_refused(hook: str, place: str) -> None:
    with use_world(VirtualWorld(2)):
        makers = PLACES[place](cg.actor(Stage))
        for hooked in range(len(makers)):
            stages = [make(hook if i == hooked else None) for i, make in enumerate(makers)]
            with pytest.raises(TraceError, match=r"'linear\.weight' has a gradient hook") as caught:
                step_of(stages)(X)
            assert "a method that the step calls behind cg.backward" in caught.value.remedy


@pytest.mark.parametrize("place", PLACES)
def test_a_method_behind_the_backward_does_their_work(place: str) -> None:
    """It is equal to hooks of plain PyTorch that step and clear one parameter each."""
    with use_world(VirtualWorld(2)):
        stages = [make() for make in PLACES[place](cg.actor(Stage))]
        step = step_of(stages)
        losses = [step(X) for _ in range(3)]
    plain = nn.Sequential(*(Stage() for _ in stages))
    for stage in plain:
        for parameter, optimizer in zip(stage.parameters(), stage.optimizers, strict=True):

            def hook(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(hook)
    for loss in losses:
        expected = plain(X).square().mean()
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())


class Hooking(Stage):
    """Puts a hook on a parameter in each call."""

    def forward(self, x: Tensor) -> Tensor:
        HOOKS["of the tensor"](self.linear.weight)
        return super().forward(x)


class Doubled(torch.autograd.Function):
    """Does the work of that hook."""

    @staticmethod
    def forward(_: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Doubling(Stage):
    def forward(self, x: Tensor) -> Tensor:
        weight = Doubled.apply(self.linear.weight)
        return torch.tanh(nn.functional.linear(x, weight, self.linear.bias))


def test_a_method_that_hooks_a_parameter_and_what_does_its_work() -> None:
    with use_world(VirtualWorld(2)):
        (make,) = PLACES["dp"](cg.actor(Hooking))
        with pytest.raises(TraceError, match=r"puts a hook on the gradient of 'linear\.weight'"):
            step_of([make()])(X)
        (make,) = PLACES["dp"](cg.actor(Doubling))
        step = step_of([make()])
        losses = [step(X) for _ in range(2)]
    plain = Stage("of the tensor")
    for loss in losses:
        expected = plain.loss(X)
        expected.backward()
        plain.update()
        torch.testing.assert_close(loss, expected.detach())


@pytest.mark.parametrize("hook", HOOKS)
def test_a_model_with_hooks_is_not_cut(hook: str) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    handle = HOOKS[hook](model[1].weight)
    with pytest.raises(ValueError, match=r"'1\.weight' of Sequential has a gradient hook"):
        cg.cut_layers(model, 2, example={"input": X})
    handle.remove()
    cg.cut_layers(model, 2, example={"input": X})
