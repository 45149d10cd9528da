"""DualPipe-V: forwards and backwards in pairs, so that each hides the other's communication."""

from __future__ import annotations

from ....ir.pipeline.order import Order, TaskRow
from .base import Pipeline, spell
from .layouts import vee


def dualpipe_v_order(pipeline: Pipeline) -> Order:
    """Order the two chunks of each rank so that an F of one stands beside a B of the other.

    With four ranks of two chunks, a line each, and eight microbatches (digits are F, small letters
    B, capitals W)::

        rank 0  0123456          7   aA   bB   cC   dD  eE..fF.gGhH
                       0aA1bB2cC3 dD4  eE5  fF6  gG7  hH  ..  .
        rank 1  .01234 5       6   aA7   bB   cC   dD  eE .f .gFhGH
                .     0 1aA2bB3 cC4   dD5  eE6  fF7  gG  h. H.
        rank 2  ..012 3 4    5   aA6   bB7   cC   dD  eE  f .gFh GH
                ..   0 1 2aA3 bB4   cC5   dD6  eE7  fF  gG h.   H
        rank 3  ...0 1 2 3 4   aA5   bB6   cC7   dD  eE  fF g h G H
                ... 0 1 2 3 aA4   bB5   cC6   dD7  eE  fF  g h G H

    In the steady state, F of chunk 0 is paired with B and W of chunk 1, and the other way round. If
    stages communicate within themselves, as experts do, one task of a pair can compute while the
    other communicates. The order shows no gain from that, as it has one task at a time. A rank
    holds at most p + 1/2 microbatches.

    Raises:
        ValueError: the stages do not lie as in 0,1,2,2,1,0.

    Source: DeepSeek-AI, DualPipe, in the technical report of DeepSeek-V3, arXiv 2412.19437, and
    its V-shaped form at github.com/deepseek-ai/DualPipe.
    """
    chunks = vee(pipeline, "dualpipe-v")
    p = len(chunks)
    # A shorter step is the beginning of a step in which every rank comes to its steady state.
    m = max(pipeline.microbatches, 2 * p)
    order: dict[int, TaskRow] = {}
    for r, rank in enumerate(pipeline.ranks):
        below = p - r - 1
        word = ["F0"] * (2 * below) + ["F0", "F1"] * (r + 1)
        word += ["B1", "W1", "F1"] * below
        word += ["F0", "B1", "W1", "F1", "B0", "W0"] * (m - 2 * p + r + 1)
        word += ["B1", "W1", "F1", "B0", "W0"] * below
        # Half of the last backwards put off their W, to fill the gaps of the very last ones.
        last = ["B1", "B0"] * (r + 1)
        for backward in last[: r + 1]:
            word += [backward, "W" + backward[1]]
        word += last[r + 1 :]
        late = ["W" + backward[1] for backward in last[r + 1 :]] + ["W0"] * below
        for weight in late[:below]:
            word += [weight, "B0"]
        order[rank] = spell(pipeline, chunks[r], word + late[below:])
    return order
