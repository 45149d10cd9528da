"""ZB-H1: 1F1B whose weight gradients fill the gaps, in the memory of 1F1B."""

from __future__ import annotations

from ....ir.pipeline.order import Order
from .base import Pipeline, spell
from .layouts import line


def zb_h1_order(pipeline: Pipeline) -> Order:
    """Order F and B as 1F1B does, and let W follow s backwards behind B on the s-th rank.

    With four ranks and eight microbatches (digits are F, small letters B, capitals W)::

        rank 0  0123...aA4bB5cC6dD7eEfFgGhH
        rank 1  .012..a3bA4cB5dC6eD7fEgFhGH
        rank 2  ..01.a2b3cA4dB5eC6fD7gEhFGH
        rank 3  ...0a1b2c3dA4eB5fC6gD7hEFGH

    The rank before waits only for B, so B comes first, and W fills gaps. The later a rank, the
    longer it would be idle at the end, and the more W it has put off. For m >= p and tw <= tf the
    bubble is (p - 1) (tf + tb - tw). Every rank holds at most p microbatches: the s-th rank holds
    p - s of them before their B, and s between B and W.

    Raises:
        ValueError: a rank hosts stages that are not neighbours.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241.
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
    """The word of `warm_up` forwards, then rounds of B, W and F, with W `lag` rounds behind B."""
    rounds = [
        "B" + "W" * (mb >= lag) + "F" * (mb + warm_up < microbatches) for mb in range(microbatches)
    ]
    return "F" * warm_up + "".join(rounds) + "W" * lag
