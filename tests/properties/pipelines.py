"""Pipelines of many shapes, to be run under every schedule: stages, skips, tied weights.

A recipe is plain data, so hypothesis can shrink it, and a job of several processes can draw the
same one in each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import cg

WIDTH = 4
LINES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved", "looped-bfs", "auto")
"""Schedules of stages that lie side by side, one on each rank (several neighbours will do)."""
LOOPS = ("interleaved", "looped-bfs", "auto", "1f1b", "gpipe")
"""Schedules of stages that go round the ranks several times."""
VEES = ("zb-v", "dualpipe-v", "auto", "1f1b", "gpipe")
"""Schedules of stages that go down the ranks and up again."""
ANY = ("auto", "1f1b", "gpipe")
"""Schedules that take stages wherever they lie."""


@cg.actor
class ResidualStage(nn.Module):
    """A stage; tensors are float64[1, WIDTH] and the like."""

    def __init__(self, number: int, frozen: int = 0) -> None:
        """Weights by `number`; 1 freezes some of them, 2 all."""
        super().__init__()
        generator = torch.Generator().manual_seed(number)

        def random(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))

        self.first, self.second = random(WIDTH, WIDTH), random(WIDTH, WIDTH)
        self.bias = random(WIDTH)
        self.table = random(3, WIDTH)
        for parameter in (self.first, self.bias) if frozen == 1 else self.parameters():
            parameter.requires_grad_(frozen == 0)

    def embed(self, indices: Tensor) -> Tensor:
        return self.forward(nn.functional.embedding(indices, self.table))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.first + self.bias) @ self.second

    def joined(self, x: Tensor, early: Tensor) -> Tensor:
        return self.forward(x * torch.sigmoid(early))

    def several(self, x: Tensor, extra: Tensor, top: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.forward(x * torch.sigmoid(extra) + nn.functional.embedding(top, self.table))
        return h, extra + h.mean(), h.argmax(-1) % 3

    def weight(self) -> Tensor:
        return self.first

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x @ self.second - y) ** 2).mean()

    def tied_loss(self, x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        return ((x @ weight.T - y) ** 2).mean()


@dataclass(frozen=True)
class Pipe:
    """A pipeline.

    Attributes:
        ranks: of each stage.
        microbatches: how many.
        skips: pairs (from, to) of stages, besides the way from each to the next.
        tied: whether the loss takes a weight of the first stage.
        embeds: whether the first stage takes integers.
        several: whether stages take and give two tensors and one of integers.
        frozen: for each stage 1 if some of its parameters are frozen, 2 if all are; () for none.
        shared: whether the stages of a rank are one actor.
        remat: stages that recompute their forwards.
        schedule: its name.
    """

    ranks: tuple[int, ...]
    microbatches: int
    skips: tuple[tuple[int, int], ...] = ()
    tied: bool = False
    embeds: bool = False
    several: bool = False
    frozen: tuple[int, ...] = ()
    shared: bool = False
    remat: frozenset[int] = frozenset()
    schedule: str = "1f1b"

    @property
    def world(self) -> int:
        return max(self.ranks) + 1

    @property
    def actors(self) -> tuple[int, ...]:
        """For each stage the first stage that is the same actor."""
        if not self.shared:
            return tuple(range(len(self.ranks)))
        return tuple(map(self.ranks.index, self.ranks))

    def frozen_at(self, stage: int) -> int:
        return self.frozen[stage] if self.frozen else 0


def draw_pipe(number: Callable[[int, int], int], most_ranks: int, most_stages: int) -> Pipe:
    """A pipeline from random numbers between two bounds, both included."""
    world = number(1, most_ranks)
    kind = number(0, 3)
    if kind == 0:
        ranks: tuple[int, ...] = tuple(range(world))
        schedules: Sequence[str] = LINES
    elif kind == 1:
        rounds = number(1, max(1, most_stages // world))
        ranks, schedules = tuple(range(world)) * rounds, LOOPS
    elif kind == 2:
        world = max(1, min(world, most_stages // 2))
        ranks, schedules = (*range(world), *reversed(range(world))), VEES
    else:
        count = number(1, most_stages)
        ranks, schedules = tuple(number(0, world - 1) for _ in range(count)), ANY
    last = len(ranks) - 1
    # Neighbours that are one actor would be one stage.
    can_share = last > 0 and all(a != b for a, b in pairwise(ranks))
    skips = {tuple(sorted((number(0, last), number(0, last)))) for _ in range(number(0, 2))}
    return Pipe(
        ranks=ranks,
        microbatches=number(1, 16),
        skips=tuple(sorted((a, b) for a, b in skips if a < b)),
        tied=number(0, 2) == 0,
        embeds=number(0, 2) == 0,
        several=number(0, 2) == 0,
        # The last stage is not frozen: a loss must depend on something.
        frozen=(*(max(0, number(-3, 2)) for _ in range(last)), 0) if number(0, 1) else (),
        shared=can_share and number(0, 3) == 0,
        remat=frozenset(i for i in range(len(ranks)) if number(0, 4) == 0),
        schedule=schedules[number(0, len(schedules) - 1)],
    )


def make_step(pipe: Pipe, stages: Sequence[Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """The step's Python, for a user to decorate."""

    def method(index: int, name: str) -> Callable[..., Tensor]:
        found = getattr(stages[index], name)
        return cg.remat(found) if index in pipe.remat else found

    def step(x: Tensor, y: Tensor) -> Tensor:
        weight = stages[0].weight() if pipe.tied else None
        losses = []
        for part, target in cg.microbatches((x, y), pipe.microbatches):
            made: list[Tensor] = []
            h = method(0, "embed")(part) if pipe.embeds else method(0, "forward")(part)
            extra, top = 0.5 * h, h.argmax(-1) % 3
            for index in range(1, len(stages)):
                made.append(h)
                early = [made[a] for a, b in pipe.skips if b == index]
                if early:
                    h = method(index, "joined")(h, early[0])
                elif pipe.several:
                    h, extra, top = method(index, "several")(h, extra, top)
                else:
                    h = method(index, "forward")(h)
            if weight is None:
                losses.append(stages[-1].loss(h, target))
            else:
                losses.append(stages[-1].tied_loss(h, weight, target))
        loss = cg.mean(losses)
        cg.backward(loss)
        return loss

    return step


def make_stages(pipe: Pipe) -> list[Any]:
    """The stages' actors, in the present world."""
    make: Callable[[int], Any] = ResidualStage.on
    made = [make(rank)(index, pipe.frozen_at(index)) for index, rank in enumerate(pipe.ranks)]
    return [made[index] for index in pipe.actors]


def inputs(pipe: Pipe) -> tuple[Tensor, Tensor]:
    """One row for each microbatch."""
    generator = torch.Generator().manual_seed(7)
    shape = (pipe.microbatches, WIDTH)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    y = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (torch.arange(pipe.microbatches) % 3 if pipe.embeds else x), y


def gradients(stages: Sequence[Any]) -> dict[str, Tensor | None]:
    """The gradients of the stages that this process holds, which are taken away from them."""
    found: dict[str, Tensor | None] = {}
    for index, stage in enumerate(stages):
        if stage.is_local:
            for name, parameter in stage.local.named_parameters():
                found[f"{index}.{name}"] = parameter.grad
                parameter.grad = None
    return found


def assert_close(
    found: dict[str, Tensor | None], expected: dict[str, Tensor | None], tolerance: float
) -> None:
    """Hold gradients against others; a tolerance of 0 means bit for bit."""
    for name, one in found.items():
        other = expected[name]
        assert (one is None) == (other is None), f"{name}: {one}, not {other}"
        if one is not None and other is not None:
            close = torch.allclose(one, other, rtol=tolerance, atol=tolerance)
            assert torch.equal(one, other) if tolerance == 0 else close, f"{name}: {one}\n{other}"
