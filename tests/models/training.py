"""Stages of models: actors, a step that trains them, and their gradients against one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import cg

from ..tracer.groups.training import cut_out, region_of

TOLERANCE = 1e-5


@cg.actor
class TrainedPart(nn.Module):
    """A part of a language model, and what trains it."""

    def __init__(self, cuts: Any, index: int, rate: float = 0.01) -> None:
        super().__init__()
        self.part = cuts.part(index)
        trained = [p for p in self.part.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=rate)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, 8)

    def lend(self) -> dict[str, torch.Tensor]:
        return self.part.lend()  # type: ignore[no-any-return]

    def forward(self, moving: Any, input_ids: torch.Tensor, lent: Mapping[str, Any]) -> Any:
        return self.part(moving, input_ids=input_ids, use_cache=False, lent=lent)

    def loss(
        self, moving: Any, input_ids: torch.Tensor, labels: torch.Tensor, lent: Mapping[str, Any]
    ) -> torch.Tensor:
        logits = self.part(moving, input_ids=input_ids, use_cache=False, lent=lent).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()


def train_once(actors: Sequence[Any], cuts: Any, batch: Any, microbatches: int) -> Any:
    """Train the stages of a model on a batch, within a step; the mean loss.

    Args:
        batch: the inputs of all stages, which a loss takes as well; or these and the labels.
    """
    lent: dict[str, Any] = {}
    for actor, stage in zip(actors, cuts, strict=True):
        lent |= actor.lend() if stage.lent else {}
    losses = []
    for mine in cg.microbatches(batch, microbatches):
        inputs, *labels = mine if isinstance(mine, tuple) else (mine,)
        moving = None
        for actor, stage in zip(actors, cuts, strict=True):
            borrowed = {name: lent[name] for name in stage.borrowed}
            if actor is actors[-1]:
                losses.append(actor.loss(moving, inputs, *labels, borrowed))
            else:
                moving = actor.forward(moving, inputs, borrowed)
    loss = cg.mean(losses)
    cg.backward(loss)
    for actor in actors:
        actor.update()
    return loss


def training_step(actors: Sequence[Any], cuts: Any, microbatches: int = 2) -> Any:
    """The step of `input_ids` and `labels` that returns the mean loss."""

    @cg.trace
    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return train_once(actors, cuts, (ids, labels), microbatches)  # type: ignore[no-any-return]

    return step


def batch(number: int, rows: int = 4, vocabulary: int = 31) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(vocabulary, (rows, 8), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def compare(actors: Sequence[Any], gradients: Mapping[str, torch.Tensor]) -> None:
    """Hold gradients against those of one process, in units of the largest of these."""
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    names: set[str] = set()
    for actor in actors:
        for rank, instance in actor.instances.items():
            names |= instance.last.keys()
            for name, mine in instance.last.items():
                if name not in gradients:
                    assert not mine.any(), f"{name} has a gradient, and none in one process"
                    continue
                region = region_of(actor, f"part.model.{name}", rank) if actor._group else None
                torch.testing.assert_close(
                    mine,
                    cut_out(gradients[name], region),
                    rtol=TOLERANCE,
                    atol=TOLERANCE * largest,
                    msg=lambda text, name=name: f"the gradient of {name}: {text}",
                )
    lost = [name for name, value in gradients.items() if name not in names and value.any()]
    assert not lost, f"no gradient of {', '.join(lost)}"
