"""A small stage that pictures and profiles are taken of."""

from __future__ import annotations

import torch

import cg


@cg.actor
class Stage(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))

    def update(self) -> None:
        self.linear.weight.grad = None
