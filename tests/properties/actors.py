"""The actor that random steps are made of: a few methods of every kind that a step may call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import cg

from .recipes import WIDTH

KINDS = 6
"""Actors with these numbers differ in weights and in what is frozen."""


@cg.actor
class Node(nn.Module):
    """Tensors are float64[rows, WIDTH]; what a method does is in its name."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(kind)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.matrix = nn.Parameter(random(WIDTH, WIDTH))
        self.bias = nn.Parameter(random(WIDTH), requires_grad=kind != 4)
        self.table = nn.Parameter(random(3, WIDTH))
        self.register_buffer("total", torch.ones(WIDTH, dtype=torch.float64))
        self.register_buffer("running", random(WIDTH))
        self.log: list[tuple[Any, ...]] = []
        if kind == 3:
            self.requires_grad_(False)

    def linear(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.matrix + self.bias)

    def mix(self, a: Tensor, b: Tensor) -> Tensor:
        return a * torch.sigmoid(b @ self.matrix)

    def split(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return x.sin(), {"cos": x.cos() * self.bias, "rows": x.shape[0], "large": (x > 0).long()}

    def peek(self, x: Tensor) -> Tensor:
        return x + self.total + self.running

    def same(self, x: Tensor) -> Tensor:
        return x

    def strided(self, x: Tensor) -> Tensor:
        return torch.stack([x, x * 2], -1)[..., 0]

    def join(self, values: list[Tensor]) -> Tensor:
        return torch.stack(values).mean(0)

    def half(self, x: Tensor) -> Tensor:
        return x * 0.5

    def accumulate(self, x: Tensor) -> Tensor:
        self.total.mul_(0.5).add_(x.detach().sum(0))
        return x + self.total.clone()

    def average(self, x: Tensor) -> Tensor:
        self.running = 0.9 * self.running + x.detach().mean(0)
        return x * 0.75

    @cg.opaque
    def note(self, x: Tensor) -> tuple[str, int]:
        self.log.append(("note", x.detach().clone()))
        return ("noted", len(self.log))

    @cg.opaque
    def check(self, note: object, x: Tensor) -> object:
        self.log.append(("check", note, x.detach().clone()))
        return (note, len(self.log))

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def draft(self, x: Tensor) -> Tensor:
        self.log.append(("draft", x.detach().clone()))
        return x.detach() + len(self.log)

    def weight(self) -> Tensor:
        return self.matrix

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(x @ weight.T)

    def indices(self, x: Tensor) -> Tensor:
        return (x.detach() > 0).sum(1).clamp(max=2)

    def look(self, indices: Tensor) -> Tensor:
        return nn.functional.embedding(indices, self.table)

    def loss(self, x: Tensor) -> Tensor:
        return (x * x).mean() + (x @ self.matrix).mean()

    def update(self) -> None:
        for name, parameter in self.named_parameters():
            grad = parameter.grad
            self.log.append((name, None if grad is None else grad.clone()))
            if grad is not None:
                parameter.data.sub_(grad, alpha=0.1)
                parameter.grad = None
