"""Stages of a model that pools, and their graphs on all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import cg

from ..gated import GatedGraphs
from ..model import ranges
from ..parts import Ways
from ..settings import Options
from ..stage_graphs import own_device
from .encoders import Encoder, Pooled, pooling_of
from .work import IDS, LENGTH, SECOND, PoolingSize


@cg.actor
class PoolingStage(nn.Module):
    """Some layers of a model that pools; the last stage gives vectors."""

    def __init__(self, model: Encoder, layers: range, dtype: torch.dtype, ways: Ways) -> None:
        super().__init__()
        self.is_last = layers.stop == model.layers
        self.part = model.build(layers, dtype, ways)
        # The last stage alone decides: where its tokens see none ahead, the last one has seen all.
        pooling = pooling_of(model.recipe, self.part.sees_ahead)
        self.pooled = Pooled(model.recipe, pooling) if self.is_last else None

    def run(self, x: Tensor | None, batch: Tensor) -> Tensor:
        """The next stage's input; of the last stage vectors, float32 [rows, width].

        Args:
            x: what the stage before gives; None for the first.
            batch: int64 [rows, IDS + tokens].
        """
        ids, lengths = batch[:, IDS:], batch[:, LENGTH]
        out: Any = self.part(ids if x is None else x, ids, lengths, batch[:, SECOND])
        vectors: Tensor = out if self.pooled is None else self.pooled(out, lengths)
        return vectors


class PoolingGraphs(GatedGraphs[PoolingSize]):
    """The stages of a model that pools; made on all ranks.

    Attributes:
        device: of this rank's stage.
        pooling: how values are pooled.
    """

    def __init__(self, model: Encoder, options: Options) -> None:
        super().__init__(options)
        count = cg.world_size() // options.ways.ranks
        parts = ranges(model.layers, count, options.layers)
        self.stages = [
            _stage(model, layers, options, number) for number, layers in enumerate(parts)
        ]
        last = [stage.pooled.pooling for stage in self.stages[-1].instances.values()]
        self.pooling = next(itertools.chain.from_iterable(cg.allgather(last)))
        self.device = own_device()
        self._padding = model.padding
        self._step = pooling_step(self.stages, options.via)

    def lower(self, size: PoolingSize) -> list[cg.Lowered]:
        return [self._step.lower(*size.example(self._padding))]


def _stage(model: Encoder, layers: range, options: Options, number: int) -> cg.ActorHandle:
    """A stage on its rank, or cut over its ranks."""
    ways = options.ways
    if ways.ranks == 1:
        return PoolingStage.on(number)(model, layers, options.dtype, ways)
    mesh = cg.mesh(range(number * ways.ranks, (number + 1) * ways.ranks), tp=ways.tp)
    return PoolingStage.on(mesh, plan=model.plan())(model, layers, options.dtype, ways)


def pooling_step(stages: Sequence[cg.ActorHandle], via: str = "auto") -> cg.Step:
    """The step of a batch of texts."""

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def vectors(batch: Tensor) -> Any:
        x = None
        for stage in stages:
            x = cg.via(stage.run(x, batch), via)
        return x

    return vectors
