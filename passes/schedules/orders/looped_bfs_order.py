"""Looped BFS: GPipe round and round the ranks."""

from __future__ import annotations

from ....ir.pipeline.order import Order, Row
from .base import Pipeline, spell
from .layouts import loop


def looped_bfs_order(pipeline: Pipeline, chunks: int | None = None) -> Order:
    """Run a chunk's forwards for all microbatches before those of the next; so the backwards.

    Four ranks of two chunks, a line each, and eight microbatches; digits are F, letters are B::

        rank 0  01234567        .........                aabbccddeeffgghh
                        01234567.........aabbccddeeffgghh
        rank 1  .01234567        ......                aabbccddeeffgghh..
                .        01234567......aabbccddeeffgghh                ..
        rank 2  ..01234567        ...                aabbccddeeffgghh....
                ..        01234567...aabbccddeeffgghh                ....
        rank 3  ...01234567                        aabbccddeeffgghh......
                ...        01234567aabbccddeeffgghh                ......

    For m >= p the bubble is that of GPipe over v, (p - 1) (tf + tb + tw) / v, and all m
    activations are held. All work on a chunk's weights is together, so sharded weights are
    gathered once for each direction, and each gradient is complete, and can be reduced, as early
    as can be.

    Args:
        pipeline: stages that go round the ranks, as in 0,1,2,0,1,2.
        chunks: how often they do; None for any number.

    Raises:
        ValueError: the stages lie in another way.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv 2211.05953.
    """
    m = pipeline.microbatches
    order: dict[int, Row] = {}
    for rank, parts in zip(pipeline.ranks, loop(pipeline, chunks, "looped-bfs"), strict=True):
        down = range(len(parts))
        word = [f"F{chunk}" for chunk in down for _ in range(m)]
        word += [f"B{chunk}" for chunk in reversed(down) for _ in range(m)]
        order[rank] = spell(pipeline, parts, word)
    return order
