"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from ...ir.attributes import Action, Task
from .base import Order, Pipeline, from_clock


def gpipe_order(pipeline: Pipeline) -> Order:
    """Run the forwards of all microbatches, then their backwards, oldest microbatch first.

    With one stage on each of p ranks and m microbatches of tf and tb, the step takes
    (m + p - 1) (tf + tb), and each stage holds m activations at its peak. The clock is the
    time at which a task starts if every task takes one unit.

    Source: Huang et al., GPipe, arXiv 1811.06965.
    """
    depths = pipeline.depths
    last = depths[-1]
    turn = pipeline.microbatches + last
    clock: dict[Task, int] = {}
    for stage, depth in enumerate(depths):
        for mb in range(pipeline.microbatches):
            clock[Task(stage, Action.FORWARD, mb)] = depth + mb
            clock[Task(stage, Action.BACKWARD, mb)] = turn + last - depth + mb
    return from_clock(pipeline, clock)
