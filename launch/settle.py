"""Settles which of the orders that a search has found a step is compiled with."""

from __future__ import annotations

from collections.abc import Callable

from ..backends.program_simulator import simulate_programs
from ..ir.clone import clone
from ..ir.module import Module
from ..passes.base import Pipeline
from ..passes.manager import PassManager
from ..passes.schedules import Schedule, candidates


def settle(
    schedule: Schedule | None, module: Module, pipeline_of: Callable[[Schedule], Pipeline]
) -> Schedule | None:
    """The schedule, or, if that is a search with costs, the candidate that is fastest on paper.

    The search plays orders of tasks; here are whole programs, with the messages, streams and slots
    that they come to have. The choice is the same on all ranks, as it depends on nothing else.

    Args:
        schedule: as `default_pipeline` takes it.
        module: traced; it stays as it is.
        pipeline_of: the passes that compile it with a schedule.

    Raises:
        IRError, ValueError: as compiling does.
    """
    if not isinstance(schedule, Schedule):
        return schedule
    found = candidates(schedule)
    if len(found) == 1:
        return schedule
    costs = dict(schedule.options)["costs"]

    def makespan(candidate: Schedule) -> float:
        compiled = clone(module)
        PassManager(pipeline_of(candidate)).run(compiled)
        # Times are sums of the same numbers in other orders: what is equal may differ a little.
        return round(simulate_programs(compiled, costs).makespan, 9)

    return min(found, key=makespan)
