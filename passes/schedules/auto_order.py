"""auto: the fastest order that a search finds in a given memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import isfinite
from operator import itemgetter

from ...ir.pipeline.costs import Costs
from ...ir.pipeline.order import Order, Row
from ...ir.pipeline.timing import play
from .base import Pipeline, spell
from .dualpipe_v_order import dualpipe_v_order
from .gpipe_order import gpipe_order
from .greedy import Policy, greedy_order
from .interleaved_order import interleaved_order
from .layouts import LayoutError
from .one_f_one_b_order import one_f_one_b_order
from .zb_h1_order import lagging, zb_h1_order
from .zb_h2_order import zb_h2_order
from .zb_v_order import zb_v_order

_KNOWN: tuple[Callable[[Pipeline], Order], ...] = (
    one_f_one_b_order,
    zb_h1_order,
    zb_h2_order,
    zb_v_order,
    dualpipe_v_order,
    interleaved_order,
    gpipe_order,
)
_POLICIES = [
    Policy(*options)
    for options in product((0.0, 0.5, 1.0), (0.0, 0.5), (False, True), (None, -1, 0))
]


def auto_order(
    pipeline: Pipeline,
    max_activations: float | None = None,
    costs: Costs | None = None,
    choice: int = 0,
) -> Order:
    """Try the known schedules and a grid of greedy ones, each on paper, and take the best.

    The best is the one with the shortest makespan, then the one that ends first, then the one
    that holds least. It is never worse than a known schedule that fits into the memory nor,
    where the stages of each rank are neighbours, than 1F1B with as few forwards ahead as fit.

    Args:
        pipeline: any stages on any ranks.
        max_activations: of how many microbatches a rank may hold the activations at once, each of
            its v stages counting 1/v; None for as many as there are ranks, as 1F1B holds.
        costs: of tasks and transfers; all tasks the same, and transfers nothing, without.
        choice: 0 for the best order, 1 for the next best, and so on; the last one if there are
            fewer.

    Raises:
        ValueError: `max_activations` is under 1: not one microbatch could pass.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241.
    """
    memory = len(pipeline.ranks) if max_activations is None else max_activations
    costs = costs or Costs()
    if not memory >= 1:  # so that NaN is refused
        raise ValueError(
            f"schedule 'auto': max_activations is {memory}; a rank must be able to hold at least 1"
        )

    def rate(order: Order) -> tuple[float, float, float]:
        timeline = play(order, pipeline.stage_ranks, pipeline.microbatches, costs)
        peak = max(timeline.peak(rank, costs.mw) for rank in order)
        if peak > memory + 1e-6:
            return float("inf"), 0.0, peak
        # Times are sums of the same numbers in other orders: what is equal may differ a little.
        return round(timeline.makespan, 9), round(timeline.end, 9), peak

    tried = (greedy_order(pipeline, memory, costs, policy) for policy in _POLICIES)
    found = [(rate(order), order) for order in (*_known(pipeline, memory), *tried)]
    found.sort(key=itemgetter(0))
    best: list[Order] = []
    for (makespan, _, _), order in found:
        if isfinite(makespan) and len(best) <= choice and order not in best:
            best.append(order)
    return best[-1]


def _known(pipeline: Pipeline, memory: float) -> Iterator[Order]:
    """The schedules that others have found, where the stages lie as these want them."""
    for rule in _KNOWN:
        try:
            yield rule(pipeline)
        except LayoutError:
            continue
    parts = pipeline.parts
    if len(parts) != len(pipeline.ranks):
        return
    # No rank is ever further ahead than twice as many as there are.
    room = int(min(memory, 2 * len(parts)))
    # 1F1B with split backwards, W at once or put off, with as few forwards ahead as fit.
    for put_off in (0, len(parts)):
        order: dict[int, Row] = {}
        for at, part in enumerate(parts):
            warm_up = min(len(parts) - at, room)
            word = lagging(pipeline.microbatches, warm_up, min(at, put_off, room - warm_up))
            order |= {pipeline.stage_ranks[part[0]]: spell(pipeline, [part], word)}
        yield order
