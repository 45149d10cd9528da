"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from ....ir.attributes import Action
from ....ir.pipeline.order import Order
from .base import Pipeline, from_clock


def gpipe_order(pipeline: Pipeline) -> Order:
    """Run the forwards of all microbatches, then their backwards, oldest microbatch first.

    With four ranks and eight microbatches (digits are F, letters are B)::

        rank 0  01234567.........aabbccddeeffgghh
        rank 1  .01234567......aabbccddeeffgghh..
        rank 2  ..01234567...aabbccddeeffgghh....
        rank 3  ...01234567aabbccddeeffgghh......

    On p ranks, m microbatches of tf, tb and tw take (m + p - 1) (tf + tb + tw), and each stage
    holds m activations at its peak. The clock is the time at which a task starts if every task
    takes one unit.

    Source: Huang et al., GPipe, arXiv 1811.06965.
    """
    depths = pipeline.depths
    last, m = depths[-1], pipeline.microbatches
    clock: dict[tuple[Action, int], range] = {}
    for stage, depth in enumerate(depths):
        back = m + 2 * last - depth
        clock[Action.FORWARD, stage] = range(depth, depth + m)
        clock[Action.BACKWARD, stage] = range(back, back + m)
    return from_clock(pipeline, clock)
