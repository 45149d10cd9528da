"""Interleaved 1F1B: several smaller chunks on each rank, for a smaller bubble."""

from __future__ import annotations

from ...ir.order import Order, Row
from .base import Pipeline, spell
from .layouts import loop


def interleaved_order(pipeline: Pipeline, chunks: int | None = None) -> Order:
    """Send microbatches through the chunks in groups, one forward for each backward."""
    order: dict[int, Row] = {}
    rounds = loop(pipeline, chunks, "interleaved")
    p = len(rounds)
    groups = _groups(pipeline.microbatches, p)
    for r, (rank, parts) in enumerate(zip(pipeline.ranks, rounds, strict=True)):
        down = range(len(parts))
        forwards = [f"F{chunk}" for size in groups for chunk in down for _ in range(size)]
        backwards = [
            f"B{chunk}" for size in groups for chunk in reversed(down) for _ in range(size)
        ]
        ahead = min(len(forwards), (len(parts) - 1) * groups[0] + 2 * (p - r - 1))
        word = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            word += [forward, backward]
        word += backwards[len(backwards) - ahead :]
        order[rank] = spell(pipeline, parts, word)
    return order


def _groups(microbatches: int, ranks: int) -> list[int]:
    """Sizes of groups of at least `ranks`, as equal as they can be, larger ones first."""
    count = max(1, microbatches // ranks)
    size, more = divmod(microbatches, count)
    return [size + 1] * more + [size] * (count - more)
