"""ZB-V: a pipeline that comes back up the ranks, with no bubble in the memory of 1F1B."""

from __future__ import annotations

from ....ir.pipeline.order import Order, TaskRow
from .base import Pipeline, spell
from .layouts import vee


def zb_v_order(pipeline: Pipeline) -> Order:
    """Order the two chunks of each rank: 0 goes down the ranks, and 1 comes up again.

    With four ranks of two chunks, a line each, and eight microbatches (digits are F, small letters
    B, capitals W)::

        rank 0  0123456            7aA   bB   cC   dD   eEfFgGhH...
                       0aA1bB2cC3dD   4eE  5fF  6gG  7hH        ...
        rank 1  .01234 5         6aA   7bB   cC   dD   e fEgFhG H..
                .     0 1aA2bB3cC   4dD   5eE  6fF  7gG h      H ..
        rank 2  ..012 3 4      5aA   6bB   7cC   dD   e f gEhF  GH.
                ..   0 1 2aA3bB   4cC   5dD   6eE  7fF g h    GH  .
        rank 3  ...0 1 2 3   4aA   5bB   6cC   7dD   e f g hE   FGH
                ... 0 1 2 3aA   4bB   5cC   6dD   7eE f g h  FGH

    The last stage is on the first rank, which therefore has a B to run as soon as a microbatch is
    through. Every rank holds at most p microbatches, as the first rank does in 1F1B. With equal
    times there is no bubble for m >= 2p - 1.

    Raises:
        ValueError: the stages do not lie as in 0,1,2,2,1,0.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241.
    """
    chunks = vee(pipeline, "zb-v")
    p = len(chunks)
    # A shorter step is the beginning of a step in which every rank comes to its steady state.
    m = max(pipeline.microbatches, 2 * p - 1)
    order: dict[int, TaskRow] = {}
    for r, rank in enumerate(pipeline.ranks):
        word = ["F0"] * (2 * (p - r) - 1) + ["F1", "F0"] * r
        word += ["F1", "B1", "W1"] * (p - r)
        word += ["F0", "B0", "W0", "F1", "B1", "W1"] * (m - 2 * p + r + 1)
        word += ["B0", "W0", "F1", "B1", "W1"] * (p - r - 1)
        word += ["B0", "B1"] * r
        word += ["B0", "W0"] * (p - r) + ["W1"] * r + ["W0"] * r
        order[rank] = spell(pipeline, chunks[r], word)
    return order
