"""Looped BFS: GPipe round and round the ranks."""

from __future__ import annotations

from ...ir.order import Order, Row
from .base import Pipeline, spell
from .layouts import loop


def looped_bfs_order(pipeline: Pipeline, chunks: int | None = None) -> Order:
    """Run each chunk's forwards for all microbatches before the next chunk's; so backwards."""
    m = pipeline.microbatches
    order: dict[int, Row] = {}
    for rank, parts in zip(pipeline.ranks, loop(pipeline, chunks, "looped-bfs"), strict=True):
        down = range(len(parts))
        word = [f"F{chunk}" for chunk in down for _ in range(m)]
        word += [f"B{chunk}" for chunk in reversed(down) for _ in range(m)]
        order[rank] = spell(pipeline, parts, word)
    return order
