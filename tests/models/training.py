"""An actor with a part of a model, and a step that trains such parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import cg


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


def training_step(actors: Sequence[Any], cuts: Any, microbatches: int = 2) -> Any:
    """The step of `input_ids` and `labels` that returns the mean loss."""

    @cg.trace
    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        lent = {}
        for actor, stage in zip(actors, cuts, strict=True):
            lent |= actor.lend() if stage.lent else {}
        losses = []
        for mine, theirs in cg.microbatches((ids, labels), microbatches):
            moving = None
            for actor, stage in zip(actors, cuts, strict=True):
                borrowed = {name: lent[name] for name in stage.borrowed}
                if actor is actors[-1]:
                    losses.append(actor.loss(moving, mine, theirs, borrowed))
                else:
                    moving = actor.forward(moving, mine, borrowed)
        loss = cg.mean(losses)
        cg.backward(loss)
        for actor in actors:
            actor.update()
        return loss

    return step


def batch(number: int, rows: int = 4, vocabulary: int = 31) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(vocabulary, (rows, 8), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
