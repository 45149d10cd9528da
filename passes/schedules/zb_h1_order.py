"""ZB-H1: 1F1B whose weight gradients fill the gaps, in the memory of 1F1B."""

from __future__ import annotations

from ...ir.order import Order
from .base import Pipeline, spell
from .layouts import line


def zb_h1_order(pipeline: Pipeline) -> Order:
    """Order F and B as 1F1B does, and let W follow s backwards behind on the s-th rank.

    The last ranks have the most idle time at the end, so they put off the most W.
    """
    parts = line(pipeline, "zb-h1")
    ranks = len(parts)
    return {
        pipeline.stage_ranks[part[0]]: spell(
            pipeline, [part], lagging(pipeline.microbatches, ranks - at, at)
        )
        for at, part in enumerate(parts)
    }


def lagging(microbatches: int, warm_up: int, lag: int) -> str:
    """`warm_up` forwards; then rounds of B, W and F, with W `lag` microbatches behind B."""
    rounds = [
        "B" + "W" * (mb >= lag) + "F" * (mb + warm_up < microbatches) for mb in range(microbatches)
    ]
    return "F" * warm_up + "".join(rounds) + "W" * lag
