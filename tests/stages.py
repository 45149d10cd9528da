"""Small stages of pipelines, which tests of several rooms train, and what a step does with them.

A test whose stage does something of its own derives from one of these, or has a class of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import cg


@cg.actor
class LinearStage(nn.Module):
    """A linear layer with tanh, and a loss. x, h, y: float32 [rows, width].

    Args:
        seed: of the weights, which are alike wherever the stage is made.
        width: of the layer.
    """

    def __init__(self, seed: int, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))

    def loss(self, h: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(h, y)


@cg.actor
class TrainedStage(LinearStage):
    """A linear stage that has an optimizer."""

    def __init__(self, seed: int, width: int = 4) -> None:
        super().__init__(seed, width)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def mean_loss(stages: Sequence[Any], batch: Any, microbatches: int) -> Any:
    """Within a step: the mean loss of a batch that goes through all stages, and its backward.

    Args:
        batch: inputs, whose loss is the mean of the squares of outputs; or inputs and targets,
            which the last stage's `loss` takes.
    """
    losses = []
    for part in cg.microbatches(batch, microbatches):
        h, *targets = part if isinstance(part, tuple) else (part,)
        for stage in stages:
            h = stage.forward(h)
        losses.append(stages[-1].loss(h, *targets) if targets else h.square().mean())
    loss = cg.mean(losses)
    cg.backward(loss)
    return loss
