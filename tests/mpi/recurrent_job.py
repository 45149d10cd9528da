"""Trains recurrent layers on rank 0 and a head on rank 1, and compares with a plain loop.

mpiexec -n 2 python -m tests.mpi.recurrent_job
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import cg

STEPS, ROWS, WIDTH = 140, 4, 3
CLASSES: Mapping[str, Callable[..., nn.RNNBase]] = {"LSTM": nn.LSTM, "GRU": nn.GRU}


class PlainLayers(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = CLASSES[kind](WIDTH, WIDTH, 2, batch_first=True).double()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[0]  # type: ignore[no-any-return]

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class PlainHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.5)

    def loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.linear(hidden), target)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@cg.actor
class Layers(PlainLayers):
    """Recurrent layers as a stage."""


@cg.actor
class Head(PlainHead):
    """A loss as a stage."""


def losses(kind: str, x: Tensor, target: Tensor) -> Iterator[float]:
    """The losses of a plain loop over two microbatches a step."""
    layers, head = PlainLayers(kind), PlainHead()
    while True:
        parts = zip(x.chunk(2), target.chunk(2), strict=True)
        loss = torch.stack([head.loss(layers(a), b) for a, b in parts]).mean()
        loss.backward()
        layers.update()
        head.update()
        yield loss.item()


def check(kind: str, schedule: Any) -> None:
    layers, head = Layers.on(0)(kind), Head.on(1)()

    @cg.trace
    def step(x: Tensor, target: Tensor) -> Tensor:
        parts = cg.microbatches((x, target), 2)
        loss = cg.mean([head.loss(layers.forward(a), b) for a, b in parts])
        cg.backward(loss)
        layers.update()
        head.update()
        return loss

    generator = torch.Generator().manual_seed(2)
    x, target = torch.randn(2, ROWS, STEPS, WIDTH, generator=generator, dtype=torch.float64)
    compiled = step.lower(x, target).compile(schedule=schedule)
    for _, expected in zip(range(4), losses(kind, x, target), strict=False):
        torch.testing.assert_close(float(compiled(x, target)), expected, rtol=1e-12, atol=0.0)


def main() -> None:
    torch.set_num_threads(1)
    for kind in CLASSES:
        for schedule in (cg.schedules.one_f_one_b(), cg.schedules.by_name("zb-h1")):
            check(kind, schedule)
    print(f"rank {cg.rank()}: recurrent layers agree")


if __name__ == "__main__":
    main()
