"""Results of a step on devices that is replayed: random numbers, values of fused kernels.

    mpiexec -n 2 python -m tests.mpi.device_job tests.mpi.captured_job dropout fused

Each word is a check. What is captured of a step is looked at, too.
"""

from __future__ import annotations

import sys

import torch

import cg

from .training_job import Block, check_captured, data, difference

STEPS = 6
"""A device replays what it has captured from the third execution on."""

WIDTH = 256
RTOL = 1e-4
"""Of fused kernels in single precision, as a share of a tensor's largest element."""


@cg.actor
class Dropping(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x)


def dropout() -> None:
    """Every step draws other masks, each rank its own, and the same ones for the same seed."""
    parts = [Dropping.on(rank)() for rank in range(cg.world_size())]

    @cg.trace
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        return [part.forward(part.drop(part.forward(x))) for part in parts]

    def masks(seed: int, passes: str = "") -> list[torch.Tensor]:
        with step.lower(torch.ones(WIDTH)).compile(seed=seed, passes=passes) as compiled:
            found = [mask for _ in range(STEPS) for mask in compiled(torch.ones(WIDTH))]
            check_captured(compiled, not passes)
            return [mask.cpu() for mask in found]

    first, again, plain, other = masks(1), masks(1), masks(1, "-capture"), masks(2)
    assert all(map(torch.equal, first, again)), "the same seed has drawn other masks"
    assert all(map(torch.equal, first, plain)), "graphs have drawn other masks"
    different = {tuple(mask.tolist()) for mask in (*first, *other)}
    assert len(different) == len(first) + len(other), "a mask has come twice"
    assert all(set(mask.tolist()) == {0.0, 8.0} for mask in first), first[0]


def fused() -> None:
    """Losses and gradients of fused kernels are those of the methods as they are."""
    found = [train(fuse) for fuse in (None, "inductor")]
    for number, (one, two) in enumerate(zip(*found, strict=True)):
        for plain, compiled in zip(one, two, strict=True):
            assert difference(compiled, plain) <= RTOL, f"step {number}: {compiled} and {plain}"


def train(fuse: str | None) -> list[list[torch.Tensor]]:
    """Of each step the loss and this rank's gradients."""
    stages = [Block.on(rank)(rank) for rank in range(cg.world_size())]

    @cg.trace
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for stage in stages[:-1]:
            x = stage.forward(x)
        loss = stages[-1].loss(x, y)
        cg.backward(loss)
        return loss

    mine = list(stages[cg.rank()].local.parameters())
    compiled = step.lower(*data(0)).compile(fuse=fuse)
    reasons = [why for name, why in compiled.fused.items() if "forward" in name or "loss" in name]
    assert (fuse is None) == ("" not in reasons), reasons
    found = []
    for number in range(STEPS):
        loss = compiled(*data(number))
        found.append([each.detach().clone() for each in (loss, *(p.grad for p in mine))])
        for parameter in mine:
            parameter.grad = None
    check_captured(compiled, True)
    compiled.close()
    return found


def main() -> None:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    for word in sys.argv[1:]:
        {"dropout": dropout, "fused": fused}[word]()
        print(f"rank {cg.rank()}: {word} is as it should be", flush=True)


if __name__ == "__main__":
    main()
