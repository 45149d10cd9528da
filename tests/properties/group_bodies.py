"""Bodies for the functions of `synthetic_groups.py`, and the same step in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.synthetic_groups import GroupSteps
from cg.ir.ops.module import Module

RATE = 2.0**-20
"""Of updates; a power of two, so that numbers stay exact."""


class Weights:
    """The weights of a stage, or a rank's pieces of them, and their gradients.

    Attributes:
        ups, downs: of each block.
    """

    def __init__(self, ups: Sequence[Tensor], downs: Sequence[Tensor]) -> None:
        self.ups = [up.clone() for up in ups]
        self.downs = [down.clone() for down in downs]
        self.clear()

    def clear(self) -> None:
        """Forget the gradients."""
        self.up_grads = [torch.zeros_like(up) for up in self.ups]
        self.down_grads = [torch.zeros_like(down) for down in self.downs]

    @property
    def tensors(self) -> list[Tensor]:
        """All weights."""
        return [*self.ups, *self.downs]

    @property
    def gradients(self) -> list[Tensor]:
        """Those of `tensors`."""
        return [*self.up_grads, *self.down_grads]

    def piece(self, index: int, count: int) -> Weights:
        """A rank's pieces: columns of `up`, and rows of `down`."""
        size = self.ups[0].shape[1] // count
        own = slice(index * size, (index + 1) * size)
        return Weights([up[:, own] for up in self.ups], [down[own] for down in self.downs])

    def accumulate(self, block: int, h: Tensor, a: Tensor, g: Tensor, inner: Tensor) -> None:
        """Add a microbatch's gradients."""
        self.up_grads[block] += torch.einsum("btd,bth->dh", h, inner)
        self.down_grads[block] += torch.einsum("bth,btd->hd", a, g)

    def update(self) -> None:
        """Take a step against the gradients."""
        for weight, gradient in zip(self.tensors, self.gradients, strict=True):
            weight -= RATE * gradient
        self.clear()


def initial(steps: GroupSteps) -> list[Weights]:
    """The weights of each stage: small whole numbers."""
    torch.manual_seed(0)
    return [
        Weights(
            [_whole_numbers(steps.width, steps.hidden) for _ in range(steps.blocks)],
            [_whole_numbers(steps.hidden, steps.width) for _ in range(steps.blocks)],
        )
        for _ in steps.stages
    ]


def _whole_numbers(*shape: int) -> Tensor:
    return torch.randint(-1, 2, shape).double()


def batch(steps: GroupSteps) -> tuple[Tensor, Tensor]:
    """The inputs of the step."""
    shape = (steps.rows * steps.microbatches, steps.tokens, steps.width)
    return _whole_numbers(*shape), _whole_numbers(*shape)


def in_one_process(steps: GroupSteps, stages: Sequence[Weights], x: Tensor, y: Tensor) -> Tensor:
    """The step with whole tensors and torch's own gradients; returns the loss."""
    for stage in stages:
        for tensor in stage.tensors:
            tensor.requires_grad_(True)
    for stage in stages:
        for up, down in zip(stage.ups, stage.downs, strict=True):
            x = x + (x @ up).relu() @ down
    loss = ((x - y) ** 2).sum() / 2 / steps.microbatches
    loss.backward()
    with torch.no_grad():
        for stage in stages:
            for tensor in stage.tensors:
                assert tensor.grad is not None
                tensor -= RATE * tensor.grad
                tensor.grad = None
    return loss.detach()


class Bodies:
    """The bodies of a rank's functions, found by their names as the generator makes them.

    Attributes:
        weights: the rank's pieces of each stage that it is part of.
    """

    def __init__(self, steps: GroupSteps, rank: int, stages: Sequence[Weights]) -> None:
        self._steps = steps
        self.weights: dict[int, Weights] = {}
        for number, home in enumerate(steps.stages):
            place = steps.places()[home]
            if rank in place.ranks:
                index, count = place.position(rank).get("tp", (0, 1))
                self.weights[number] = stages[number].piece(index, count)

    def of(self, module: Module) -> dict[str, Callable[..., Sequence[Any]]]:
        """By name."""
        names = {function.body_name for function in module.functions.values()}
        return {name: self._body(name) for name in names if not name.startswith("builtin.")}

    def _body(self, name: str) -> Callable[..., Sequence[Any]]:
        if name == "mean":
            return lambda *losses: [torch.stack(losses).sum() / len(losses)]
        if name == "mean.bwd":
            count = self._steps.microbatches
            return lambda grad: [grad / count for _ in range(count)]
        actor, method, *rest = name.split(".")
        number = int(actor[1:])
        kind = rest[0] if rest and not rest[0].isdecimal() else ""
        part = int(rest[-1]) if rest and rest[-1].isdecimal() else 0

        def run(*operands: Tensor) -> Sequence[Any]:
            weights = self.weights[number]
            if method == "forward" and kind in ("", "fwd"):
                return self._forward(weights, part, kind == "fwd", *operands)
            if method == "forward":
                return self._backward(weights, part, kind, number == 0, *operands)
            if method == "loss":
                return _loss(kind, *operands)
            if method == "reduce_gradients":
                return _reduce(weights, *operands)
            assert method == "update", name
            weights.update()
            return [None]

        return run

    def _forward(
        self, weights: Weights, block: int, saves: bool, h: Tensor, *reduced: Tensor
    ) -> Sequence[Any]:
        hidden = [h + r for r in reduced]
        if block == self._steps.blocks:
            return hidden
        (h,) = hidden or (h,)
        inner = (h @ weights.ups[block]).relu()
        return [*hidden, inner @ weights.downs[block], *[inner] * saves]

    def _backward(
        self, weights: Weights, part: int, kind: str, first: bool, *operands: Tensor
    ) -> Sequence[Any]:
        block = self._steps.blocks - 1 - part
        if block < 0:
            return [operands[0] + operands[1]]
        h, a, g, *more = operands
        if kind == "w":
            weights.accumulate(block, h, a, g, *more)
            return [None]
        grads = [g + reduced for reduced in more]
        (g,) = grads or (g,)
        inner = (g @ weights.downs[block].T) * (a > 0)
        if kind == "bwd":
            weights.accumulate(block, h, a, g, inner)
        if first and not block:
            return [*grads, None]
        return [*grads, inner @ weights.ups[block].T, *[inner] * (kind == "in")]


def _loss(kind: str, *operands: Tensor) -> Sequence[Any]:
    if kind == "bwd":
        distance, grad = operands
        return [distance * grad]
    h, y = operands
    distance = h - y
    return [(distance**2).sum() / 2, *[distance] * (kind == "fwd")]


def _reduce(weights: Weights, *total: Tensor) -> Sequence[Any]:
    """The gradients in one row, or what is put back of it."""
    if not total:
        return [torch.cat([gradient.flatten() for gradient in weights.gradients])]
    parts = total[0].split([gradient.numel() for gradient in weights.gradients])
    for gradient, part in zip(weights.gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
    return [None]
