"""ZB-H2: more forwards ahead, so that no rank ever waits."""

from __future__ import annotations

from ....ir.pipeline.order import Order
from .base import Pipeline, spell
from .layouts import line
from .zb_h1_order import lagging


def zb_h2_order(pipeline: Pipeline) -> Order:
    """Run 2 (p - s) - 1 forwards first on the s-th rank; let W follow 2s backwards behind B.

    With four ranks and eight microbatches (digits are F, small letters B, capitals W)::

        rank 0  0123456aA7bBcCdDeEfFgGhH...
        rank 1  .01234a5b6cA7dBeCfDgEhFGH..
        rank 2  ..012a3b4c5d6eA7fBgChDEFGH.
        rank 3  ...0a1b2c3d4e5f6gA7hBCDEFGH

    The first forwards last until the first B is back, so there is no gap at the beginning. The W
    that are put off fill the gap at the end. For m >= 2p - 1 and tw <= tf, tb the bubble is
    (p - 1) (tf + tb - 2 tw), which is 0 if all times are equal. Every rank holds at most 2p - 1
    microbatches. The next step can follow without a gap if no rank waits for all others between.

    Raises:
        ValueError: a rank hosts stages that are not neighbours.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241.
    """
    parts = line(pipeline, "zb-h2")
    ranks = len(parts)
    return {
        pipeline.stage_ranks[part[0]]: spell(
            pipeline, [part], lagging(pipeline.microbatches, 2 * (ranks - at) - 1, 2 * at)
        )
        for at, part in enumerate(parts)
    }
