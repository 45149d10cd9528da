"""Pipeline stages that sleep instead of computing, so that few cores can play many ranks.

Sleeping takes longer than asked for, by an amount that drifts, so the last of it is spent awake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor, nn

import cg

ROWS, WIDTH = 2, 8
_AWAKE = 1.5e-4
"""Seconds at the end of a sleep that are spent awake: nine sleeps of ten are late by less.

The shorter the better, as few cores play many ranks.
"""


def spend(milliseconds: float) -> None:
    """Return after so many milliseconds."""
    end = perf_counter() + milliseconds / 1e3
    sleep(max(0.0, milliseconds / 1e3 - _AWAKE))
    while perf_counter() < end:
        pass


@dataclass(frozen=True)
class Times:
    """Milliseconds of a forward, of the gradient of its input, and of that of its weight."""

    tf: float
    tb: float
    tw: float

    @property
    def whole(self) -> float:
        return self.tf + self.tb + self.tw

    def over(self, chunks: int) -> Times:
        """Those of one of so many chunks."""
        return Times(self.tf / chunks, self.tb / chunks, self.tw / chunks)


@torch.library.custom_op("sleeping::scale", mutates_args=())
def scale(x: Tensor, weight: Tensor, tf: float, tb: float, tw: float) -> Tensor:
    """`x * weight`, [rows, width], in `tf` milliseconds; its gradients take `tb` and `tw`."""
    spend(tf)
    return x * weight


@torch.library.custom_op("sleeping::input_gradient", mutates_args=())
def input_gradient(grad: Tensor, weight: Tensor, tb: float) -> Tensor:
    spend(tb)
    return grad * weight


@torch.library.custom_op("sleeping::weight_gradient", mutates_args=())
def weight_gradient(grad: Tensor, x: Tensor, tw: float) -> Tensor:
    spend(tw)
    return (grad * x).sum(0)


@scale.register_fake
def _(x: Tensor, weight: Tensor, tf: float, tb: float, tw: float) -> Tensor:
    return torch.empty_like(x)


@input_gradient.register_fake
def _(grad: Tensor, weight: Tensor, tb: float) -> Tensor:
    return torch.empty_like(grad)


@weight_gradient.register_fake
def _(grad: Tensor, x: Tensor, tw: float) -> Tensor:
    return grad.new_empty(grad.shape[1:])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, tb, tw = inputs
    ctx.save_for_backward(x, weight)
    ctx.times = (tb, tw)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    tb, tw = ctx.times
    of_input = input_gradient(grad, weight, tb) if ctx.needs_input_grad[0] else None
    return of_input, weight_gradient(grad, x, tw), None, None, None


scale.register_autograd(_backward, setup_context=_setup)


@cg.actor
class Sleeper(nn.Module):
    """A stage. Tensors are f32[ROWS, WIDTH].

    Nobody needs the gradient of the first stage's input, so nothing computes it. A real stage
    has the gradients of what is inside of it to compute: so here its weight's takes all the time.
    """

    def __init__(self, times: Times, first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        tb, tw = (0.0, times.tb + times.tw) if first else (times.tb, times.tw)
        self.times = (times.tf, tb, tw)

    def forward(self, x: Tensor) -> Tensor:
        return scale(x, self.weight, *self.times)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x - y) ** 2).mean()


def make_step(stages: Sequence[Any], microbatches: int) -> cg.Step:
    """One training step through `stages`, without an update."""

    @cg.trace
    def step(x: Tensor, y: Tensor) -> Tensor:
        losses = []
        for part, target in cg.microbatches((x, y), microbatches):
            for stage in stages:
                part = stage.forward(part)
            losses.append(stages[-1].loss(part, target))
        loss = cg.mean(losses)
        cg.backward(loss)
        return loss

    return step


def make_stages(ranks: Sequence[int], times: Times) -> list[Any]:
    """A stage for each of `ranks`; those of one rank share its times."""
    make: Callable[[int], Any] = Sleeper.on
    return [
        make(rank)(times.over(ranks.count(rank)), index == 0) for index, rank in enumerate(ranks)
    ]


def batch(microbatches: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step: no two rows are alike, so gradients depend on their order."""
    x = torch.linspace(-1.0, 1.0, ROWS * microbatches * WIDTH).reshape(-1, WIDTH)
    return x, torch.zeros_like(x)
