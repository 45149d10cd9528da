"""Trains on the ranks of a job, and on one alone, from the same weights: the same numbers.

    mpiexec -n 2 python -m tests.mpi.training_job 200

Single precision, deterministic. In every step all losses and gradients are compared, under each
combination of capture and overlap; every rank trains all stages by itself, on its own device. On a
device, what is captured must have been replayed, if there are steps enough.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

import cg
from cg.backends.devices.programs.capture import WARM_UPS
from cg.launch.world import world as worlds

WIDTH, ROWS, MICROBATCHES = 32, 16, 4
SWITCHES = ("", "-capture", "-overlap", "-capture,-overlap")
RTOL = 1e-5


@cg.actor
class Block(torch.nn.Module):
    """A residual block; all ranks make the same one of a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        with torch.device("cpu"):
            self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
            self.down = torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((self.forward(x) - y) ** 2).mean()


def main() -> None:
    # cuBLAS asks for it where sums are to be in the same order each time.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(1)
    steps = int(sys.argv[1])
    for switches in SWITCHES:
        worst = train(steps, switches)
        if cg.rank() == 0:
            print(f"passes='{switches}': the worst of {steps} steps differs by {worst:.1e}")
    print(f"rank {cg.rank()}: trained as on one device")


def train(steps: int, switches: str) -> float:
    """Train, and alone beside it; the largest relative difference of a loss or gradient."""
    count = cg.world_size()
    stages = [Block.on(rank)(rank) for rank in range(count)]

    @cg.trace
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = []
        for mx, my in cg.microbatches((x, y), MICROBATCHES):
            for stage in stages[:-1]:
                mx = stage.forward(mx)
            losses.append(stages[-1].loss(mx, my))
        loss = cg.mean(losses)
        cg.backward(loss)
        return loss

    mine: Block = stages[cg.rank()].local
    alone = [Block(rank).to(next(mine.parameters()).device) for rank in range(count)]
    optimizers = [optimizer(mine), optimizer(torch.nn.ModuleList(alone))]
    compiled = step.lower(*data(0)).compile(passes=switches)
    worst = 0.0
    for number in range(steps):
        found = compiled(*data(number))
        wanted = plain(alone, *data(number))
        pairs = [(found, wanted)]
        ours, theirs = mine.named_parameters(), alone[cg.rank()].named_parameters()
        pairs += [(one.grad, two.grad) for (_, one), (_, two) in zip(ours, theirs, strict=True)]
        worst = max(worst, *(difference(one, two) for one, two in pairs))
        assert worst <= RTOL, f"step {number}, passes='{switches}': {worst}"
        for each in optimizers:
            each.step()
            each.zero_grad()
    if worlds.world().device is not None and steps > WARM_UPS:
        check_captured(compiled, "-capture" not in switches)
    compiled.close()
    return worst


def check_captured(compiled: Any, captures: bool) -> None:
    """Every part of this rank's program that can be captured has been, and was replayed."""
    segments = segments_of(compiled)
    assert bool(segments) == captures, segments
    assert all(each.reason is None for each in segments), [each.reason for each in segments]
    assert all(each.replays > 0 for each in segments), [each.replays for each in segments]


def segments_of(compiled: Any) -> Sequence[Any]:
    """The parts of this rank's program that are captured; none where it has no device."""
    (executables,) = compiled._runtimes[0].bound.values()
    return getattr(executables[0], "segments", ())


def plain(blocks: Sequence[Block], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same step, eagerly on one device."""
    device = next(blocks[0].parameters()).device
    parts = []
    chunks = [each.to(device).chunk(MICROBATCHES) for each in (x, y)]
    for px, py in zip(*chunks, strict=True):
        for block in blocks[:-1]:
            px = block.forward(px)
        parts.append(blocks[-1].loss(px, py))
    loss = torch.stack(parts).mean()
    loss.backward()
    return loss.detach()


def optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a step: two tensors float32[ROWS, WIDTH] on the host."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator)
    return x, y


def difference(one: Any, two: Any) -> float:
    """Of two tensors, relative to the largest element."""
    scale = two.abs().max().item()
    return float((one.detach() - two).abs().max().item() / scale) if scale else 0.0


if __name__ == "__main__":
    main()
