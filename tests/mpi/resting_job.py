"""Trains with parameters on the host and without, on fake devices, and compares the bits.

    CG_DEVICE=fake mpiexec -n 2 python -m tests.mpi.resting_job 1f1b zb-h1 interleaved stored uneven

Each word is a schedule of a pipeline over the ranks, or a group of all ranks: `stored` in equal
pieces, `uneven` in pieces of several sizes, `copies` without a cut, `tp` in pieces that are used as
they are. Each rank prints a line for each word.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import cg

STEPS = 5
"""More than the two that run as they are before graphs are captured and replayed."""

GROUPS: dict[str, dict[str, Any]] = {
    "stored": {"store": cg.cut(0, "dp")},
    "uneven": {"store": cg.cut(0, "dp"), "width": 15},
    "copies": {},
    "tp": {
        "plan": {
            "blocks.*.up.weight|blocks.*.up.bias": cg.cut(0, "dp"),
            "blocks.*.down.weight": cg.cut(1, "dp"),
        }
    },
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


@cg.actor
class RestingStage(nn.Module):
    def __init__(self, seed: int, width: int, optimizer: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(2)))
        self.optimizer = optimizer(self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x)
        return y

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def trained(actors: list[Any], width: int, schedule: cg.schedules.Schedule) -> list[Tensor]:
    """The losses of some steps, and this rank's pieces of the parameters behind them."""

    @cg.trace
    def step(x: Tensor) -> Tensor:
        losses = []
        for part in cg.microbatches(x, 4):
            for actor in actors:
                part = actor.forward(part)
            losses.append(part.square().mean())
        loss = cg.mean(losses)
        cg.backward(loss)
        cg.clip_grad_norm(actors, 1.0)
        for actor in actors:
            actor.update()
        return loss

    x = torch.randn(16, width, generator=torch.Generator().manual_seed(1))
    compiled = step.lower(x).compile(schedule=schedule)
    values = [compiled(x).detach().cpu() for _ in range(STEPS)]
    local = [actor.local for actor in actors if actor.is_local]
    values += [p.detach().cpu().clone() for module in local for p in module.parameters()]
    return values


def actors_of(word: str, on_host: str | None) -> tuple[list[Any], int]:
    """The actors of a word, and the width of their layers."""
    options = dict(GROUPS.get(word, {}))
    width = options.pop("width", 16)
    cut = options.pop("store", None)
    store = (cut, on_host) if cut is not None and on_host else cut or on_host
    more = {**options, **({} if store is None else {"store": store})}
    if word in GROUPS:
        return [RestingStage.on(cg.mesh(dp=cg.world_size()), **more)(0, width, adamw)], width
    count = cg.world_size() * (2 if word == "interleaved" else 1)
    places = [stage % cg.world_size() for stage in range(count)]
    return [RestingStage.on(rank, **more)(i, width, adamw) for i, rank in enumerate(places)], width


def main() -> None:
    for word in sys.argv[1:]:
        schedule = cg.schedules.by_name("1f1b" if word in GROUPS else word)
        values = []
        for on_host in (None, "host", "host-state") if word == "uneven" else (None, "host"):
            actors, width = actors_of(word, on_host)
            values.append(trained(actors, width, schedule))
            local = [actor.local for actor in actors if actor.is_local]
            kinds = {p.device.type for module in local for p in module.parameters()}
            assert kinds == {"cpu" if on_host == "host" else "fake"}, kinds
        expected, *others = values
        assert len(expected) > STEPS
        same = [
            torch.equal(one, other)
            for resting in others
            for one, other in zip(expected, resting, strict=True)
        ]
        print(f"{word} on rank {cg.rank()}: {sum(same)} of {len(same)} are the same bits")


if __name__ == "__main__":
    main()
