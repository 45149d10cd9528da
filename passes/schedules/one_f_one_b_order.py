"""1F1B: each stage goes over to alternating forwards and backwards as soon as it can."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.attributes import Action
from ...ir.order import Order
from .base import Pipeline, from_clock


def one_f_one_b_order(pipeline: Pipeline) -> Order:
    """Run as many forwards as there are ranks ahead, then one backward for each forward.

    With one stage on each of p ranks, stage s holds at most p - s activations; the step takes
    as long as under GPipe. The clock is the time at which a task starts if every task takes one
    unit: the first microbatch comes back to a stage of depth d at 2p - 1 - d, the others follow
    at every second unit, and the forwards that do not fit before that fill the gaps.

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
