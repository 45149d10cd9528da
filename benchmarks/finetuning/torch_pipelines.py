"""Stages of a Qwen2 model in torch.distributed.pipelining, their step, and what ties their ends."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from .shapes import SHAPES, Shape, stage_layers
from .training import CLIP, DECAY, RATE, next_token_loss, trainers

HOMES: dict[str, Callable[[int], list[int]]] = {
    "Schedule1F1B": lambda ranks: [*range(ranks)],
    "ScheduleZBVZeroBubble": lambda ranks: [*range(ranks), *reversed(range(ranks))],
    "ScheduleInterleavedZeroBubble": lambda ranks: [*range(ranks)] * 2,
}
"""The rank of each stage, by schedule."""


def splits_backwards(schedule: str) -> bool:
    """Whether gradients of weights are made apart from those of inputs."""
    return "ZeroBubble" in schedule


class Part(nn.Module):
    """Some layers of a model, with the embedding or the head at an end of it.

    Takes tokens int64 [batch, length], or what the part before gives, float32 [batch, length,
    width]; gives that, or logits bfloat16 [batch, length, vocabulary].
    """

    def __init__(self, model: Any, layers: range, is_last: bool) -> None:
        super().__init__()
        inner = model.model
        self.embedding = None if layers.start else inner.embed_tokens
        self.rotary = inner.rotary_emb
        self.layers = nn.ModuleList(inner.layers[index] for index in layers)
        self.norm = inner.norm if is_last else None
        self.head = model.lm_head if is_last else None

    def forward(self, moving: Tensor) -> Tensor:
        with torch.autocast(moving.device.type, torch.bfloat16):
            hidden = moving if self.embedding is None else self.embedding(moving)
            positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
            angles = self.rotary(hidden, positions)
            for layer in self.layers:
                hidden = layer(hidden, position_ids=positions, position_embeddings=angles)
            if self.norm is None or self.head is None:
                return hidden
            logits: Tensor = self.head(self.norm(hidden))
            return logits


@dataclass
class Ends:
    """The embedding and the head, which are one tensor of the model.

    On one rank they are one parameter. On two, each has a copy and adds the other's gradient.
    """

    embedding: nn.Parameter | None
    head: nn.Parameter | None

    @property
    def copies(self) -> list[nn.Parameter]:
        """What this rank has of a pair that is on two ranks."""
        ends = [end for end in (self.embedding, self.head) if end is not None]
        return ends if len(ends) == 1 else []

    def add_gradients(self) -> None:
        """Collective: the ranks of the two ends are all there are."""
        for copy in self.copies:
            dist.all_reduce(copy.grad)


def clip(parameters: Sequence[nn.Parameter], counted: Sequence[nn.Parameter]) -> None:
    """Clip by the norm over all ranks; collective.

    Args:
        parameters: of this rank.
        counted: those that are in the norm, each on one rank.
    """
    norm = torch.nn.utils.get_total_norm([p.grad for p in counted if p.grad is not None])
    square = norm.square()
    dist.all_reduce(square)
    torch.nn.utils.clip_grads_with_norm_(parameters, CLIP, square.sqrt())


def stage_of(part: Part, index: int, count: int, rows: int, shape: Shape, device: Any) -> Any:
    """A stage whose shapes are told, so that it need not be run to learn them."""
    ids = torch.empty(rows, shape.length, dtype=torch.int64, device="meta")
    hidden = torch.empty(rows, shape.length, shape.width, device="meta", requires_grad=True)
    size = (rows, shape.length, shape.vocabulary)
    logits = torch.empty(size, dtype=torch.bfloat16, device="meta", requires_grad=True)
    return PipelineStage(
        part,
        index,
        count,
        device,
        input_args=(hidden if index else ids,),
        output_args=(logits if index == count - 1 else hidden,),
    )


def make_step(
    model: Any, args: argparse.Namespace, device: torch.device
) -> Callable[[Tensor], Tensor | None]:
    """A training step; its loss is known on the rank of the last stage."""
    shape, rank = SHAPES[args.shape], dist.get_rank()
    homes = HOMES[args.schedule](dist.get_world_size())
    count, microbatches = len(homes), args.microbatches
    layers = stage_layers(shape, count)
    mine = [index for index, home in enumerate(homes) if home == rank]
    parts = [Part(model, layers[index], index == count - 1).to(device) for index in mine]
    rows = shape.batch // microbatches
    stages = [
        stage_of(part, index, count, rows, shape, device)
        for part, index in zip(parts, mine, strict=True)
    ]

    def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
        return next_token_loss(logits, ids) / microbatches

    kind: Any = getattr(schedules, args.schedule)
    is_single = issubclass(kind, schedules.PipelineScheduleSingle)
    taken = stages[0] if is_single else stages
    schedule = kind(taken, microbatches, loss_fn=loss_of, scale_grads=False)
    first = model.model.embed_tokens.weight if 0 in mine else None
    last = parts[-1].head.weight if count - 1 in mine else None
    ends = Ends(first, last)
    parameters = list(dict.fromkeys(p for part in parts for p in part.parameters()))
    counted = [p for p in parameters if p is not last or p is first]
    optimizer, rates = trainers(parameters, RATE, DECAY, args.steps)

    def step(ids: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        tokens = ids.to(device)
        arguments = (tokens,) if first is not None else ()
        targets = {} if last is None else {"target": tokens, "losses": losses}
        schedule.step(*arguments, **targets, return_outputs=False)
        ends.add_gradients()
        clip(parameters, counted)
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else None

    return step
