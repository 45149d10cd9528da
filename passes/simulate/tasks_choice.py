"""Choose how many tasks of a rank are in flight, by programs on paper."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.ops.module import Module
from ...ir.pipeline.costs import Costs
from .memory_plan import memory_plan
from .program_simulator import simulate_programs


def choose_tasks(
    one: Module, two: Module, costs: Costs, limits: Sequence[int] | None
) -> tuple[int, str]:
    """The number of tasks in flight, and a line that says why.

    Two tasks are chosen only if they are faster than one, and keep to the limit of memory.

    Args:
        one, two: the programs with as many tasks in flight.
        costs: the times of calls and messages.
        limits: the most bytes that the program of each rank may hold; None: any number.

    Raises:
        ValueError: the costs are for fewer stages.
    """
    times = [simulate_programs(module, costs).comparable_makespan for module in (one, two)]
    number = 2 if times[1] < times[0] else 1
    why = "as fast" if times[0] == times[1] else "faster"
    if number == 2 and not _keeps_to(limits, two):
        number, why = 1, "what memory allows"
    count = f"{number} task{'s' * (number > 1)} of a rank in flight"
    return number, f"{count}, {why}: {times[0]:.6g} ms with 1, {times[1]:.6g} ms with 2"


def _keeps_to(limits: Sequence[int] | None, module: Module) -> bool:
    """True if no program holds more than its rank may."""
    if limits is None:
        return True
    return all(memory_plan(module, rank).peak <= limit for rank, limit in enumerate(limits))
