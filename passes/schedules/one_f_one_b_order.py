"""1F1B: each stage goes over to alternating forwards and backwards as soon as it can."""

from __future__ import annotations

from ...ir.attributes import Action, Task
from .base import Order, Pipeline, from_clock


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
    ranks = depths[-1] + 1
    clock: dict[Task, int] = {}
    for stage, depth in enumerate(depths):
        warm_up = ranks - depth
        for mb in range(pipeline.microbatches):
            forward = depth + mb if mb < warm_up else depth + 2 * mb
            clock[Task(stage, Action.FORWARD, mb)] = forward
            clock[Task(stage, Action.BACKWARD, mb)] = 2 * ranks - 1 - depth + 2 * mb
    return from_clock(pipeline, clock)
