"""Train a tiny model in stages, and hold losses and gradients against plain transformers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.launch.world.world import use_world

from .encoders import Inputs, Kind
from .training import TOLERANCE, compare, gradients_of, train_once

STEPS, ROWS, MICROBATCHES, RATE = 2, 4, 2, 0.05


def batches(kind: Kind) -> list[Inputs]:
    generator = torch.Generator().manual_seed(1)
    return [kind.inputs(generator, ROWS) for _ in range(STEPS)]


def _halves(inputs: Inputs) -> list[Inputs]:
    """The microbatches of a batch."""
    size = ROWS // MICROBATCHES
    return [
        {
            name: value[start : start + size] if isinstance(value, torch.Tensor) else value
            for name, value in inputs.items()
        }
        for start in range(0, ROWS, size)
    ]


def train_plainly(kind: Kind, model: nn.Module) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """In one process: the loss and the gradients of each step."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    record = []
    for inputs in batches(kind):
        loss = torch.stack([kind.loss(model(**half)) for half in _halves(inputs)]).mean()
        loss.backward()
        record.append((loss.item(), gradients_of(model)))
        optimizer.step()
        optimizer.zero_grad()
    return record


@cg.actor
class EncoderStage(nn.Module):
    """A part of a cut model, what trains it, and the gradients of its last update."""

    def __init__(self, kind: Kind, cuts: Any, index: int, constants: Inputs) -> None:
        super().__init__()
        self.part = cuts.part(index)
        self.optimizer = torch.optim.SGD(self.part.parameters(), lr=RATE)
        self.loss_of, self.constants = kind.loss, constants
        self.last: dict[str, torch.Tensor] = {}

    def lend(self) -> dict[str, torch.Tensor]:
        return self.part.lend()  # type: ignore[no-any-return]

    def forward(self, moving: Any, inputs: Inputs, lent: Mapping[str, Any]) -> Any:
        return self.part(moving, **inputs, **self.constants, lent=lent)

    def loss(self, moving: Any, inputs: Inputs, lent: Mapping[str, Any]) -> torch.Tensor:
        return self.loss_of(self.forward(moving, inputs, lent))  # type: ignore[no-any-return]

    def update(self) -> None:
        self.last = gradients_of(self.part.model)
        self.optimizer.step()
        self.optimizer.zero_grad()


def train_in_stages(kind: Kind, stages: int | Sequence[int]) -> None:
    """Train in the virtual world, and compare after each step."""
    model = kind.model()
    record = train_plainly(kind, model)
    split = [_split(inputs) for inputs in batches(kind)]
    cuts = cg.cut_layers(model, stages, example=batches(kind)[0])
    with use_world(VirtualWorld(len(cuts))):
        actors = [
            EncoderStage.on(index)(kind, cuts, index, split[0][1])  # type: ignore[attr-defined]
            for index in range(len(cuts))
        ]

        @cg.trace
        def step(inputs: Inputs) -> torch.Tensor:
            return train_once(actors, cuts, inputs, MICROBATCHES)  # type: ignore[no-any-return]

        compiled = step.lower(split[0][0]).compile(schedule=cg.schedules.zb_h1())
        for (tensors, _), (loss, gradients) in zip(split, record, strict=True):
            torch.testing.assert_close(
                float(compiled(tensors)), loss, rtol=TOLERANCE, atol=TOLERANCE
            )
            compare(actors, gradients)


def _split(inputs: Inputs) -> tuple[Inputs, Inputs]:
    """The tensors among a model's inputs, and the others."""
    tensors = {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor)}
    return tensors, {k: v for k, v in inputs.items() if k not in tensors}
