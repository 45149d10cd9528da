"""ZB-H2: more forwards ahead, so that no rank ever waits."""

from __future__ import annotations

from ...ir.order import Order
from .base import Pipeline, spell
from .layouts import line
from .zb_h1_order import lagging


def zb_h2_order(pipeline: Pipeline) -> Order:
    """Run 2(p - s) - 1 forwards first on the s-th rank; let W follow 2s backwards behind."""
    parts = line(pipeline, "zb-h2")
    ranks = len(parts)
    return {
        pipeline.stage_ranks[part[0]]: spell(
            pipeline, [part], lagging(pipeline.microbatches, 2 * (ranks - at) - 1, 2 * at)
        )
        for at, part in enumerate(parts)
    }
