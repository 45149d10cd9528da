"""Run the gradients of weights right behind those of inputs, on ranks whose memory is short.

What B leaves to W waits for W: cotangents, which nothing computes again. Where nothing else helps,
a rank gives up the time that it gains by putting W off.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from ...ir.attributes import Action, Task
from ...ir.pipeline.order import Order
from ..schedules import Pipeline, Schedule, is_search, one_f_one_b


def can_run_early(schedule: Schedule | None) -> bool:
    """True if a schedule puts off W, and its order is not searched for."""
    return schedule is not None and schedule.splits and not is_search(schedule)


def with_early_weights(schedule: Schedule | None, ranks: Collection[int]) -> Schedule | None:
    """The schedule in whose orders W follows its B on some ranks.

    If W comes earlier on a rank than in a valid order, the order is valid, as W needs its B alone.
    Each stage still takes its microbatches in the order of their B.
    """
    if not ranks:
        return schedule
    plain = schedule or one_f_one_b()

    def order(pipeline: Pipeline, **options: Any) -> Order:
        rows = plain.order(pipeline, **options)
        return {rank: _early(row) if rank in ranks else row for rank, row in rows.items()}

    return replace(plain, order=order)


def _early(row: Sequence[Task]) -> list[Task]:
    """The tasks of a rank with each W right behind its B."""
    put_off = {task for task in row if task.action is Action.WEIGHT}
    early: list[Task] = []
    for task in row:
        if task.action is Action.WEIGHT:
            continue
        early.append(task)
        weight = task.beside(Action.WEIGHT)
        if task.action is Action.BACKWARD and weight in put_off:
            early.append(weight)
    return early
