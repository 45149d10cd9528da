"""Trains a pipeline on fake devices that cg itself gives the ranks, and compares with the host.

    CG_DEVICE=fake mpiexec -n 2 python -m tests.mpi.rehearsal_job train

With `train-by-hosts` the messages of stages go by the hosts, and the loss between the devices.
Between the graphs of a step each actor has an update that is opaque, as a trainer has. `refuse`
checks that each rank refuses what a GPU refuses, and `host` prints the losses alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

import cg

STEPS = 6
"""More than the two that run as they are before graphs are captured and replayed."""


@cg.actor
class RehearsedStage(torch.nn.Module):
    """Some layers, and methods that mix devices."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(4))
        )
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]

    def loss(self, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(h, y)

    @cg.opaque(fake=lambda self, h, y: h.new_zeros(()))
    def slow_loss(self, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Rank 0 has put all of its messages on their way before the first one is used."""
        time.sleep(0.05)
        return self.loss(h, y)

    def mixes(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros(x.shape, device="cpu")

    @cg.opaque
    def mixes_by_hand(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros(x.shape, device="cpu")

    @cg.opaque
    def draws_on_the_host(self, x: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(x.abs(), 1, generator=torch.Generator())

    @cg.opaque
    def asks_numpy(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy())

    @cg.opaque
    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(backend: str = "auto") -> None:
    stages = [RehearsedStage.on(rank)(rank) for rank in range(cg.world_size())]

    @cg.trace
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = []
        for mx, my in cg.microbatches((x, y), 4):
            h = mx
            for stage in stages:
                h = cg.via(stage.forward(h), backend)
            losses.append(stages[-1].loss(h, my))
        loss = cg.mean(losses)
        cg.backward(loss)
        for stage in stages:
            stage.update()
        return loss

    @cg.trace
    def evaluate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = []
        for mx, my in cg.microbatches((x, y), 8):  # more than there are slots
            h = mx
            for stage in stages:
                h = cg.via(stage.forward(h), backend)
            losses.append(stages[-1].slow_loss(h, my))
        return cg.mean(losses)

    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 16, 16, generator=generator)
    compiled = step.lower(x, y).compile(schedule=cg.schedules.one_f_one_b())
    losses = [float(compiled(x, y)) for _ in range(STEPS)]
    with torch.no_grad():
        losses.append(float(evaluate(x, y)))
    print(f"rank {cg.rank()} trained: {' '.join(f'{loss:.6f}' for loss in losses)}", flush=True)


def refused(call: Callable[[], object]) -> str:
    """The words of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return str(error)
    return "nothing was refused"


def refuse() -> None:
    stage = RehearsedStage.on(0)(0)
    x = torch.ones(2, 16)

    def in_a_step(name: str) -> str:
        @cg.trace
        def step(x: torch.Tensor) -> torch.Tensor:
            return getattr(stage, name)(x)  # type: ignore[no-any-return]

        return refused(lambda: step.lower(x).compile()(x))

    @cg.trace
    def forward(x: torch.Tensor) -> torch.Tensor:
        return stage.forward(x)

    for name in ("mixes", "mixes_by_hand", "draws_on_the_host", "asks_numpy"):
        print(f"rank {cg.rank()} {name}: {in_a_step(name)}", flush=True)
    result = forward.lower(x).compile()(x)
    for name, call in {
        "numpy": lambda: result.numpy(),
        "sum": lambda: result + x,
    }.items():
        print(f"rank {cg.rank()} {name} of {result.device}: {refused(call)}", flush=True)
    print(f"rank {cg.rank()} copies: {float((result.cpu() - x).sum()):.3f}", flush=True)


def main() -> None:
    run = {"train": train, "train-by-hosts": lambda: train("cpu"), "refuse": refuse}
    run[sys.argv[1]]()


if __name__ == "__main__":
    main()
