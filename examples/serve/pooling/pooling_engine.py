"""The engine of a model that pools: batches of texts through stages on all ranks."""

from __future__ import annotations

from time import monotonic
from typing import Any

import numpy as np
import torch

import cg

from ..growing import GrowingEngine, warm_ups_on
from ..progress import said
from ..requests import Limits
from ..results import Tokens, copies_of
from ..settings import Options
from ..variants import bucket
from .encoders import Encoder
from .stages import PoolingGraphs
from .work import IDS, LENGTH, SECOND, PoolingSize, Texts, Vectors


class CgVectors(Tokens):
    """The result of a batch: its vectors, which come to the host as tokens do."""

    def vectors(self) -> Vectors:
        (values,) = self._parts()
        vectors: Vectors = values[: self._count].cpu().numpy()
        return vectors


class CgPoolingEngine(GrowingEngine[PoolingSize]):
    """Rank 0's end of the engine; `start_pooling` makes it.

    Attributes:
        rows, tokens, budget: as `work.PoolingEngine`.
    """

    graphs: PoolingGraphs

    def __init__(self, model: Encoder, limits: Limits, options: Options, graphs: Any) -> None:
        self.rows, self.tokens = options.batches, options.chunks
        assert options.prompt_tokens is not None, "the batch is bounded"
        self.budget = options.prompt_tokens
        later = [size for size in largest(options) if size not in graphs.compiled]
        warm_ups = warm_ups_on(graphs.device) if options.warm else 0
        super().__init__(graphs, later if options.late else [], warm_ups, options.in_flight)
        self.limits, self._padding = limits, model.padding
        self._copies = copies_of(graphs.device)

    def close(self) -> None:
        super().close()
        if self._copies is not None:
            self._copies.close()

    def examples(self, size: PoolingSize) -> list[tuple[Any, ...]]:
        return [size.example(self._padding)]

    def may_serve(self, size: PoolingSize, ideal: PoolingSize) -> bool:
        return True

    def general(self, ideal: PoolingSize) -> PoolingSize:
        return ideal

    def submit(self, work: Texts) -> CgVectors:
        """Start work; waits while `Options.in_flight` executions of its graph are under way.

        If no variant holds it, one is compiled first.

        Raises:
            ValueError: it is outside of the limits; nothing was started.
        """
        self.drop_ended()
        self._check(work)
        longest = max(len(text.tokens) for text in work.texts)
        size = self.needed(
            PoolingSize(bucket(self.rows, len(work.texts)), bucket(self.tokens, longest))
        )
        numbers = size.padding(self._padding)
        for row, text in zip(numbers, work.texts, strict=False):
            row[LENGTH], row[SECOND] = len(text.tokens), text.second
            row[IDS : IDS + len(text.tokens)] = text.tokens
        (graph,) = self.graphs.compiled[size]
        future = graph.execute(torch.from_numpy(numbers))
        self.flying.append(future)
        return CgVectors(future, len(work.texts), copies=self._copies)

    def _check(self, work: Texts) -> None:
        limits = self.limits
        if not 0 < len(work.texts) <= self.rows[-1]:
            raise ValueError(f"{len(work.texts)} texts of at most {self.rows[-1]}")
        for text in work.texts:
            ids = np.asarray(text.tokens)
            if not 0 < len(ids) <= limits.context:
                raise ValueError(f"{len(ids)} tokens of at most {limits.context}")
            if ids.min() < 0 or ids.max() >= limits.vocabulary:
                raise ValueError(f"a token is not from 0 to below {limits.vocabulary}")
            if not 0 <= text.second < len(ids):
                raise ValueError(f"a second text at {text.second} of {len(ids)} tokens")


def largest(options: Options) -> list[PoolingSize]:
    """The largest batch of texts of each length, and the smallest, short texts first."""
    assert options.prompt_tokens is not None, "the batch is bounded"
    sizes = list[PoolingSize]()
    for tokens in options.chunks:
        most = max(1, options.prompt_tokens // tokens)
        fitting = [rows for rows in options.batches if rows <= most]
        sizes += [PoolingSize(rows, tokens) for rows in sorted({fitting[-1], fitting[0]})[::-1]]
    return sizes


def first_size(options: Options) -> PoolingSize:
    """The variant that is compiled first: the largest batch of texts of `Options.first_chunk`."""
    wanted = options.first_chunk or options.chunks[-1]
    tokens = bucket(options.chunks, min(wanted, options.chunks[-1]))
    return next(size for size in largest(options) if size.tokens == tokens)


def start_pooling(model: Encoder, options: Options) -> CgPoolingEngine | None:
    """Start the engine; collective.

    Args:
        options: the same on all ranks. `batches` are numbers of texts and `chunks` lengths, of
            which the longest is the context; `prompt_tokens` bounds a batch.

    Returns:
        The engine on rank 0, once its first variants have run; None on other ranks, which serve
        until rank 0 has closed it.

    Raises:
        ValueError: the options do not fit the model, or the number of ranks.
    """
    check_stages(model, options)
    began = monotonic()
    with said("reading the weights", cg.rank() == 0):
        graphs = PoolingGraphs(model, options)
    sizes = [first_size(options)] if options.late else largest(options)
    for number, size in enumerate(sizes, 1):
        with said(f"compiling variant {number} of {len(sizes)}, {size}", cg.rank() == 0):
            graphs.compile(size)
    graphs.open()
    if cg.rank() != 0:
        graphs.follow()
        return None
    engine = CgPoolingEngine(model, limits_of(model, options), options, graphs)
    with said("running them on padding"):
        for size in sizes:
            engine.warm(size)
    engine.rest(monotonic() - began)
    return engine


def check_stages(model: Encoder, options: Options) -> None:
    """Check that the ranks can hold a model's stages.

    Raises:
        ValueError: they cannot.
    """
    ranks, tp = cg.world_size(), options.tp
    for name, number in (("ep", options.ep), ("cp", options.cp)):
        if number != 1:
            raise ValueError(f"--{name} is for models that draw tokens: give --tp, or leave it out")
    if tp < 1 or ranks % tp or any(number % tp for number in model.heads):
        heads = " and ".join(map(str, model.heads))
        raise ValueError(
            f"{ranks} ranks by {tp} for each stage do not fit a model with {heads} heads: --tp has "
            "to divide the ranks, and the numbers of heads"
        )
    if ranks // tp > model.layers:
        raise ValueError(
            f"{ranks // tp} stages are more than the {model.layers} layers: give fewer ranks, or "
            "more --tp"
        )


def limits_of(model: Encoder, options: Options) -> Limits:
    """The limits that the front has to know; there are no blocks."""
    return Limits(
        groups=1,
        slots=options.batches[-1],
        chunk=options.chunks[-1],
        blocks=1,
        block_size=1,
        context=options.chunks[-1],
        vocabulary=model.vocabulary,
        eos=(),
        width=model.width,
    )
