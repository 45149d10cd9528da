"""Looped BFS: GPipe round and round the ranks."""

from __future__ import annotations

from ....ir.pipeline.order import Order, TaskRow
from .base import Pipeline, spell
from .layouts import loop


def looped_bfs_order(pipeline: Pipeline, chunks: int | None = None) -> Order:
    """Run all forwards of a chunk before those of the next chunk, and likewise the backwards.

    With four ranks of two chunks, a line each, and eight microbatches (digits are F, letters are
    B)::

        rank 0  01234567        .........                aabbccddeeffgghh
                        01234567.........aabbccddeeffgghh
        rank 1  .01234567        ......                aabbccddeeffgghh..
                .        01234567......aabbccddeeffgghh                ..
        rank 2  ..01234567        ...                aabbccddeeffgghh....
                ..        01234567...aabbccddeeffgghh                ....
        rank 3  ...01234567                        aabbccddeeffgghh......
                ...        01234567aabbccddeeffgghh                ......

    With v chunks on each rank and m >= p, the bubble is that of GPipe divided by v,
    (p - 1) (tf + tb + tw) / v, and all m activations are held. All work on a chunk's weights is
    together. So sharded weights are gathered once for each direction, and each gradient is complete
    as early as possible, and can be reduced.

    Args:
        pipeline: its stages go round the ranks, as in 0,1,2,0,1,2.
        chunks: how often they go round; None: any number.

    Raises:
        ValueError: the stages lie on the ranks in another way.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv 2211.05953.
    """
    m = pipeline.microbatches
    order: dict[int, TaskRow] = {}
    for rank, parts in zip(pipeline.ranks, loop(pipeline, chunks, "looped-bfs"), strict=True):
        down = range(len(parts))
        word = [f"F{chunk}" for chunk in down for _ in range(m)]
        word += [f"B{chunk}" for chunk in reversed(down) for _ in range(m)]
        order[rank] = spell(pipeline, parts, word)
    return order
