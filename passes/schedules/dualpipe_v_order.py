"""DualPipe-V: forwards and backwards in pairs, so that each hides the other's communication."""

from __future__ import annotations

from ...ir.order import Order, Row
from .base import Pipeline, spell
from .layouts import vee


def dualpipe_v_order(pipeline: Pipeline) -> Order:
    """Order the two chunks of each rank, 0 going down the ranks and 1 coming up again."""
    chunks = vee(pipeline, "dualpipe-v")
    p = len(chunks)
    # A shorter step is what is left of one in which every rank comes to its steady state.
    m = max(pipeline.microbatches, 2 * p)
    order: dict[int, Row] = {}
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
