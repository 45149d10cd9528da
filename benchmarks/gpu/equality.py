"""Losses of training steps against those of a plain loop on one GPU."""

from __future__ import annotations

from typing import Any

import torch

import cg

from .report import Report
from .timing import reasons


@cg.actor
class Block(torch.nn.Module):
    def __init__(self, seed: int, lr: float) -> None:
        super().__init__()
        torch.manual_seed(seed)
        with torch.device("cpu"):
            self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        self.to("cuda")
        self.optimizer = torch.optim.SGD(self.parameters(), lr=lr, momentum=0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((self.forward(x) - y) ** 2).mean()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


STEPS = 200


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(16, 32, generator=generator).cuda() for _ in range(2))  # type: ignore[return-value]


def plain(stages: int) -> list[float]:
    """The losses of a plain loop on this rank's GPU."""
    blocks = [Block(i, 0.05) for i in range(stages)]
    losses = []
    for i in range(STEPS):
        x, y = data(i)
        parts = []
        for px, py in zip(x.chunk(4), y.chunk(4), strict=True):
            for block in blocks[:-1]:
                px = block.forward(px)
            parts.append(blocks[-1].loss(px, py))
        loss = torch.stack(parts).mean()
        loss.backward()
        for block in blocks:
            block.update()
        losses.append(loss.item())
    return losses


def equality(report: Report) -> None:
    """Losses of training steps against a plain loop on one GPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True)
    count = cg.world_size()
    right = plain(count)
    for switches in ("", "-capture", "-overlap", "-capture,-overlap"):
        stages = [Block.on(rank)(rank, 0.05) for rank in range(count)]

        @cg.trace
        def step(x: torch.Tensor, y: torch.Tensor, stages: Any = stages) -> torch.Tensor:
            losses = []
            for px, py in cg.microbatches((x, y), 4):
                for stage in stages[:-1]:
                    px = stage.forward(px)
                losses.append(stages[-1].loss(px, py))
            loss = cg.mean(losses)
            cg.backward(loss)
            for stage in stages:
                stage.update()
            return loss

        compiled = step.lower(*data(0)).compile(passes=switches)
        losses = [compiled(*data(i)) for i in range(STEPS)]
        values = [loss.item() for loss in losses]
        worst = max(abs(a - b) / abs(b) for a, b in zip(values, right, strict=True))
        report.note(
            "equality", f"worst relative error of {STEPS} losses, passes='{switches}'", worst, ""
        )
        report.say("   ", reasons(compiled))
        compiled.close()
    torch.use_deterministic_algorithms(False)
