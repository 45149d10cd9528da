"""auto: the fastest order that a search finds in a given memory."""

from __future__ import annotations

from dataclasses import replace

from ....ir.pipeline.costs import Costs
from ....ir.pipeline.order import Order
from ..orders.base import Pipeline
from .find_orders import Found, find_orders


def auto_order(
    pipeline: Pipeline,
    max_activations: float | None = None,
    costs: Costs | None = None,
    choice: int = 0,
    *,
    max_bytes: float | tuple[float, ...] | None = None,
    seed: int = 0,
    seconds: float | None = None,
    splits: bool = True,
    remat: bool = False,
    measure: bool | str = False,
) -> Order:
    """The best order of a search; see `auto_orders`.

    Args:
        pipeline, max_activations, costs, max_bytes, seed, seconds, splits, remat: as in
            `auto_orders`.
        choice: 0 for the best order, 1 for the second best, and so on; the last order if there are
            fewer.
        measure: must be false; to compile a step, its costs have been measured before.

    Raises:
        ValueError: as `auto_orders`, or `measure` is given.
    """
    if measure:
        raise ValueError(
            "schedule 'auto': measure is for compile, which can run the step; on paper, give costs"
        )
    orders = auto_orders(
        pipeline,
        max_activations,
        costs,
        max_bytes=max_bytes,
        seed=seed,
        seconds=seconds,
        splits=splits,
        remat=remat,
    )
    return orders[min(choice, len(orders) - 1)].order


def auto_orders(
    pipeline: Pipeline,
    max_activations: float | None = None,
    costs: Costs | None = None,
    *,
    max_bytes: float | tuple[float, ...] | None = None,
    seed: int = 0,
    seconds: float | None = None,
    splits: bool = True,
    remat: bool = False,
) -> tuple[Found, ...]:
    """The best orders of a search, best first, with a lower bound of the makespan.

    Orders are compared by makespan, then by the end of the last task, then by peak memory. The best
    is never worse than a known schedule that fits into the memory.

    Args:
        pipeline: any stages on any ranks.
        max_activations: the most microbatches whose activations a rank may hold at once; each of
            its v stages counts 1/v. None: as many as there are ranks, as 1F1B holds.
        costs: the costs of tasks and transfers. None: all tasks take the same time, and transfers
            take none.
        max_bytes: instead of `max_activations`, the most bytes that a rank may hold: one number, or
            one for each rank, in the order in which a microbatch first comes to them. It needs
            `costs.activation_bytes`.
        seed: the seed of the search's random moves.
        seconds: the time of the search. None: a number of trials that depends only on the size of
            the pipeline, so that the result is the same on every machine.
        splits: whether an order may have W.
        remat: whether to choose stages that recompute, if memory is short; the costs must have
            `mr`. `Found.remat` lists them.

    Raises:
        ValueError: `max_activations` is under 1, not one microbatch fits into the memory, or the
            arguments do not fit together.

    Source: the search is ours; its parts name their sources. Zero-bubble schedules with a bound on
    memory, in which W fills gaps, are from Qi et al., Zero Bubble Pipeline Parallelism, arXiv
    2401.10241, and Pipeline Parallelism with Controllable Memory, 2405.15362.
    """
    costs = costs or Costs()
    if max_bytes is not None:
        if max_activations is not None:
            raise ValueError("schedule 'auto': give max_activations or max_bytes, not both")
        if costs.activation_bytes is None:
            raise ValueError(
                "schedule 'auto': max_bytes needs Costs(activation_bytes=...), the bytes that a "
                "microbatch holds on each stage"
            )
        if isinstance(max_bytes, tuple) and len(max_bytes) != len(pipeline.ranks):
            raise ValueError(
                f"schedule 'auto': max_bytes is given for {len(max_bytes)} ranks, but the "
                f"pipeline has {len(pipeline.ranks)}"
            )
        return find_orders(
            pipeline, costs, max_bytes, splits=splits, seed=seed, seconds=seconds, remat=remat
        )
    memory = len(pipeline.ranks) if max_activations is None else max_activations
    if not memory >= 1:  # so that NaN is refused
        raise ValueError(
            f"schedule 'auto': max_activations is {memory}; a rank must be able to hold at least 1"
        )
    counted = replace(costs, activation_bytes=None, weight_bytes=None)
    return find_orders(
        pipeline, counted, memory, splits=splits, seed=seed, seconds=seconds, remat=remat
    )
