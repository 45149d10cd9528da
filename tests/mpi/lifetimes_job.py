"""What outlives a replay on a device is not written over by other replays.

    mpiexec -n 2 python -m tests.mpi.device_job tests.mpi.lifetimes_job

All graphs of a process share the memory of what lives within a replay. So graphs are captured here
in orders in which what one leaves behind could lie where another one works.
"""

from __future__ import annotations

import torch

import cg

SIZE = 64
"""Of one tensor, in each case, so that any memory fits any value."""


@cg.actor
class Worker(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w

    def wander(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """`y`, by way of several values that are dropped at once."""
        for number in range(6):
            x = (x + number) * 2
        return y + x * 0

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.w).sum()

    @cg.opaque(fake=lambda self: None)
    def look(self) -> None:
        """The host has to do this, so a program is cut here."""


def main() -> None:
    between_segments()
    kept_by_the_caller()
    gradients()
    print(f"rank {cg.rank()}: nothing was written over")


def full(value: float) -> torch.Tensor:
    return torch.full((SIZE,), float(value))


def between_segments() -> None:
    """The first segment is captured anew, once its input stays where it is, the second is not."""
    a, b = Worker.on(0)(), Worker.on(1)()

    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        y = a.forward(x)
        a.look()
        return b.forward(a.wander(a.wander(y, y), y))

    compiled = step.lower(full(0.0)).compile()
    kept = [full(float(i)) for i in range(4)]
    for x in (*kept, *[kept[0]] * 6, *kept):
        assert torch.equal(compiled(x).cpu(), x), x
    compiled.close()


def kept_by_the_caller() -> None:
    """Any number of results of one program are kept, while another runs between."""
    a, b = Worker.on(0)(), Worker.on(1)()

    @cg.trace
    def one(x: torch.Tensor) -> torch.Tensor:
        return b.forward(a.wander(x, a.forward(x)))

    @cg.trace
    def other(x: torch.Tensor) -> torch.Tensor:
        return a.wander(x, b.wander(x, b.forward(x)))

    between, keeping = (step.lower(full(0.0)).compile() for step in (one, other))
    kept = []
    for number in range(8):
        between(full(-1.0))
        kept.append(keeping(full(number)))
    between(full(-1.0))
    for number, found in enumerate(kept):
        assert torch.equal(found.cpu(), full(number)), (number, found)
    for program in (between, keeping):
        program.close()


def gradients() -> None:
    """They stay for the optimizer, whatever runs before it does."""
    a, b = Worker.on(0)(), Worker.on(1)()
    mine = (a, b)[cg.rank()].local

    @cg.trace
    def train(x: torch.Tensor) -> torch.Tensor:
        loss = b.loss(a.forward(x))
        cg.backward(loss)
        return loss

    @cg.trace
    def infer(x: torch.Tensor) -> torch.Tensor:
        return b.wander(x, a.wander(x, a.forward(x)))

    inferring, training = infer.lower(full(0.0)).compile(), train.lower(full(0.0)).compile()
    for _ in range(4):
        inferring(full(1.0))
    for number in range(1, 6):
        mine.zero_grad()
        training(full(float(number)))
        inferring(full(7.0))
        assert torch.equal(mine.w.grad.cpu(), full(float(number))), (number, mine.w.grad)
    for program in (inferring, training):
        program.close()


if __name__ == "__main__":
    main()
