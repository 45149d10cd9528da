"""1F1B: each stage alternates forwards and backwards as soon as it can."""

from __future__ import annotations

from collections.abc import Sequence

from ....ir.attributes import Action
from ....ir.pipeline.order import Order
from .base import Pipeline, from_clock


def one_f_one_b_order(pipeline: Pipeline) -> Order:
    """Run as many forwards as there are ranks from here on, then one backward for each forward.

    With four ranks and eight microbatches (digits are F, letters are B)::

        rank 0  0123......aa4bb5cc6dd7ee.ff.gg.hh
        rank 1  .012....aa3bb4cc5dd6ee7ff.gg.hh..
        rank 2  ..01..aa2bb3cc4dd5ee6ff7gg.hh....
        rank 3  ...0aa1bb2cc3dd4ee5ff6gg7hh......

    The step takes as long as with GPipe, (m + p - 1) (tf + tb + tw), but stage s holds at most
    p - s activations. The clock is the time at which a task starts if every task takes one unit.
    The first microbatch comes back to a stage of depth d at 2p - 1 - d, and the others follow every
    second unit. The forwards that do not fit before that fill the gaps.

    Source: Narayanan et al., PipeDream, arXiv 1806.03377; its synchronous form in Megatron-LM,
    arXiv 2104.04473.
    """
    depths = pipeline.depths
    ranks, m = depths[-1] + 1, pipeline.microbatches
    clock: dict[tuple[Action, int], Sequence[int]] = {}
    for stage, depth in enumerate(depths):
        warm_up, back = min(m, ranks - depth), 2 * ranks - 1 - depth
        clock[Action.FORWARD, stage] = [
            *range(depth, depth + warm_up),
            *range(depth + 2 * warm_up, depth + 2 * m, 2),
        ]
        clock[Action.BACKWARD, stage] = range(back, back + 2 * m, 2)
    return from_clock(pipeline, clock)
