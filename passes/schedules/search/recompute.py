"""Choose the stages that recompute if memory is short: their B runs their forward again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ....ir.pipeline.costs import Costs
from ..orders.base import Pipeline
from .bound import MOST_TASKS, find_windows
from .list_scheduling import list_schedule
from .policies import SEEDS
from .problem import OrderProblem
from .stretch import fewer_microbatches

SEARCHES = 3
"""The most sets of stages that a search tries; one if there are more than `MOST_TASKS` tasks."""
_SPREAD = 8
"""The number of steps in which the count of stages that recompute is tried first."""
_PIECES = 16
"""The most pieces in which stages are tried that need not recompute."""
_POLICIES = 4
"""The number of list schedules by which a set of stages is judged."""


def sets_to_try(
    pipeline: Pipeline, costs: Costs, memory: float | tuple[float, ...], splits: bool
) -> list[tuple[int, ...]]:
    """The sets of stages to recompute that promise the shortest orders, best first.

    The earlier a stage, the longer its activations wait for their B. So the first stages recompute,
    as many as is best; then those that need not recompute are taken out. A set is judged by the
    best of a few list schedules of few microbatches.

    Args:
        pipeline: any stages on any ranks.
        costs: the costs, with `mr`; their `remat` is ignored.
        memory, splits: as in `find_orders`.

    Returns:
        At most `SEARCHES` sets with which one microbatch fits; if there are none, the largest set.
        Stages that would hold no less memory are in no set.

    Raises:
        ValueError: the costs have no `mr`.
    """
    if costs.mr is None:
        raise ValueError(
            "schedule 'auto': remat needs costs with mr, the share of its activations that a stage "
            "that recomputes holds between F and B: Costs(mr=...), or --mr of cg-sim"
        )
    whole = OrderProblem.of(pipeline, replace(costs, remat=()), memory, splits)
    few = min(fewer_microbatches(whole), MOST_TASKS * whole.microbatches // whole.tasks)
    pipeline = Pipeline(pipeline.stage_ranks, max(1, few))
    every = replace(costs, remat=tuple(range(pipeline.stages)))
    useful = [part for part in range(len(pipeline.parts)) if _gains(every, pipeline.parts[part])]
    spans: dict[tuple[int, ...], float] = {}

    def span(parts: Iterable[int]) -> float:
        chosen = tuple(sorted(stage for part in parts for stage in pipeline.parts[part]))
        if chosen not in spans:
            problem = OrderProblem.of(pipeline, replace(costs, remat=chosen), memory, splits)
            spans[chosen] = math.inf if problem.lacking() else _shortest(problem)
        return spans[chosen]

    count = _best_count(len(useful), lambda count: span(useful[:count]))
    needed = useful[:count]
    width = max(1, count // _PIECES)
    for at in range(0, count, width):
        piece = useful[at : min(at + width, count)]
        fewer = [part for part in needed if part not in piece]
        if span(fewer) <= span(needed) < math.inf:
            needed = fewer
    ranked = sorted(spans, key=lambda chosen: (round(spans[chosen], 9), len(chosen)))
    fitting = [chosen for chosen in ranked if spans[chosen] < math.inf]
    most = SEARCHES if whole.tasks <= MOST_TASKS else 1
    return fitting[:most] or [max(spans, key=len)]


def _gains(costs: Costs, part: Sequence[int]) -> bool:
    """True if recomputing makes a part hold less memory before B."""
    memories = [costs.memory(stage, False) for stage in part]
    return any(memory.before < memory.during for memory in memories)


def _shortest(problem: OrderProblem) -> float:
    """The span of the best of a few list schedules."""
    windows = find_windows(problem)
    least = math.inf
    for policy in SEEDS[:_POLICIES]:
        rule = policy.rule(problem, policy.urgency(problem, windows))
        listed = list_schedule(problem, rule, least)
        if listed is not None:
            least = min(least, max(listed.spans(problem)))
    return least


def _best_count(most: int, span: Callable[[int], float]) -> int:
    """The number from 0 to `most` with the shortest span, of those that the search tries."""
    counts = {round(most * share / _SPREAD) for share in range(_SPREAD + 1)}
    step = most // _SPREAD
    while True:
        best = min(counts, key=lambda count: (round(span(count), 9), count))
        if not step:
            return best
        counts |= {max(0, best - step), min(most, best + step)}
        step //= 2
