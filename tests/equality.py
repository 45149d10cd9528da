"""A small GPT, trained by compiled steps and by a plain PyTorch loop, side by side.

    mpiexec -n 4 python -m tests.equality every

The stages are those of examples/train_gpt.py. The plain loop knows nothing of ranks: one model, all
microbatches one after the other, gradients added up by autograd.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cg

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from train_gpt import Config, Stage, cut

STEPS, BATCH, MICROBATCHES, SEED = 5, 8, 4, 0
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Relative to each element, and to the largest of its tensor: sums that cancel leave rounding."""

BASIC = ("gpipe", "1f1b")
"""Schedules that are compared in both precisions."""


@cg.actor
class Recorded(Stage):
    """A stage that remembers the gradients that it has been updated with."""

    def __init__(self, config: Config, layers: range) -> None:
        super().__init__(config, layers, SEED, 2e-3, STEPS)
        self.first = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        self.gradients: list[dict[str, Tensor]] = []

    def update(self) -> None:
        named = self.named_parameters()
        self.gradients.append({name: p.grad.clone() for name, p in named})
        super().update()

    def restart(self) -> None:
        """Be as new."""
        self.load_state_dict(self.first)
        self.optimizer.state.clear()
        self.scheduler.last_epoch = -1
        self.scheduler.step()
        self.gradients.clear()


@dataclass(frozen=True)
class Layout:
    """Where the stages are.

    Attributes:
        name: for messages.
        ranks: of each stage, in order.
        schedules: names of schedules that must take it.
    """

    name: str
    ranks: tuple[int, ...]
    schedules: tuple[str, ...]


def layouts(world: int, every: bool) -> Iterator[Layout]:
    """One stage a rank; then, if `every` schedule is wanted, two: in loops, and down and up."""
    ranks = tuple(range(world))
    others = ("interleaved", "looped-bfs", "zb-h1", "zb-h2", "auto")
    yield Layout("one stage a rank", ranks, BASIC + others if every else BASIC)
    if every and world == 2:
        yield Layout("two loops", ranks * 2, ("interleaved", "looped-bfs"))
        yield Layout("down and up", ranks + ranks[::-1], ("zb-v", "dualpipe-v"))


def compare_all(every: bool) -> list[str]:
    """Compare what this world can run, with `every` schedule or the basic ones; a line each."""
    done = []
    layers = max(4, cg.world_size())
    for layout in layouts(cg.world_size(), every):
        for dtype in TOLERANCE:
            names = [n for n in layout.schedules if dtype is torch.float64 or n in BASIC]
            if names:
                done += _compare(layout, names, dtype, layers)
    return done


def comparisons(world: int) -> int:
    """How many there are with every schedule: all in float64, the basic two in float32."""
    return 2 + sum(len(layout.schedules) for layout in layouts(world, True))


def _compare(
    layout: Layout, schedules: list[str], dtype: torch.dtype, layers: int
) -> Iterator[str]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        config = Config(layers=layers, width=12, heads=2, context=6, vocabulary=20)
        batches = [_batch(config, step) for step in range(STEPS)]
        losses, gradients = _plain(config, batches)
        parts = cut(layers, len(layout.ranks))
        stages = [
            Recorded.on(rank)(config, part) for rank, part in zip(layout.ranks, parts, strict=True)
        ]
        lowered = _step(stages).lower(*batches[0])
        for name in schedules:
            compiled = lowered.compile(schedule=cg.schedules.by_name(name))
            found = [compiled(x, y) for x, y in batches]
            what = f"{name}, {layout.name}, {cg.world_size()} ranks, {dtype}"
            for step in range(STEPS):
                _hold(f"{what}: loss {step}", losses[step], found[step])
            for stage in stages:
                if stage.is_local:
                    _hold_gradients(what, stage.local, gradients)
                    stage.local.restart()
            compiled.close()
            yield what
    finally:
        torch.set_default_dtype(before)


def _batch(config: Config, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, BATCH, config.context)
    x, y = torch.randint(config.vocabulary, shape, generator=generator)
    return x, y


def _plain(
    config: Config, batches: list[tuple[Tensor, Tensor]]
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Losses and gradients of a plain PyTorch loop."""
    model = Recorded(config, range(config.layers))
    losses = []
    for x, y in batches:
        total = torch.zeros(())
        for mx, my in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            loss = model.loss(model.forward(mx), my) / MICROBATCHES
            loss.backward()
            total += loss.detach()
        model.update()
        losses.append(total)
    return losses, model.gradients


def _step(stages: list[Any]) -> cg.Step:
    @cg.trace
    def train(x: Tensor, y: Tensor) -> Tensor:
        losses = []
        for mx, my in cg.microbatches((x, y), MICROBATCHES):
            h = mx
            for stage in stages:
                h = stage.forward(h)
            losses.append(stages[-1].loss(h, my))
        loss = cg.mean(losses)
        cg.backward(loss)
        for stage in stages:
            stage.update()
        return loss

    return train


def _hold_gradients(what: str, stage: Recorded, wanted: list[dict[str, Tensor]]) -> None:
    assert len(stage.gradients) == STEPS, what
    for step, found in enumerate(stage.gradients):
        assert found.keys() == {name for name, _ in stage.named_parameters()}
        for name, gradient in found.items():
            _hold(f"{what}: gradient of {name} in step {step}", wanted[step][name], gradient)


def _hold(what: str, wanted: Tensor, found: Tensor) -> None:
    tolerance = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(
        found,
        wanted,
        rtol=tolerance,
        atol=tolerance * float(wanted.abs().max()),
        msg=lambda text: f"{what}: {text}",
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in compare_all(every="every" in sys.argv):
        print(f"rank {cg.rank()}: {line}")
