"""ZB-V: a pipeline that comes back up the ranks, with no bubble in the memory of 1F1B."""

from __future__ import annotations

from ...ir.order import Order, Row
from .base import Pipeline, spell
from .layouts import vee


def zb_v_order(pipeline: Pipeline) -> Order:
    """Order the two chunks of each rank, 0 going down the ranks and 1 coming up again."""
    chunks = vee(pipeline, "zb-v")
    p = len(chunks)
    # A shorter step is what is left of one in which every rank comes to its steady state.
    m = max(pipeline.microbatches, 2 * p - 1)
    order: dict[int, Row] = {}
    for r, rank in enumerate(pipeline.ranks):
        word = ["F0"] * (2 * (p - r) - 1) + ["F1", "F0"] * r
        word += ["F1", "B1", "W1"] * (p - r)
        word += ["F0", "B0", "W0", "F1", "B1", "W1"] * (m - 2 * p + r + 1)
        word += ["B0", "W0", "F1", "B1", "W1"] * (p - r - 1)
        word += ["B0", "B1"] * r
        word += ["B0", "W0"] * (p - r) + ["W1"] * r + ["W0"] * r
        order[rank] = spell(pipeline, chunks[r], word)
    return order
