"""Read and write schedules as text: a line for each rank, with its tasks in order."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ....ir.attributes import Action, Task
from ....ir.pipeline.order import Order
from .base import Pipeline

_LABEL = re.compile(r"\s*(?:rank\s+)?(.*?)\s*[:|](.*)", re.S)


def parse_table(text: str, file: str) -> dict[int, list[Task]]:
    """Read a table.

    The lines are for ranks 0, 1, ... in turn, or begin with their rank: `2: 2F0 2B0`. Blanks or
    commas separate tasks. A comment goes from a `#` to the end of its line.

    A printed grid is a table, too: `rank 2 | . . 2F0 2B0`. Its dots, which stand for idle time, are
    skipped. If a grid has only W for a stage and a microbatch, no other stage waits for that
    backward; its B is added right ahead of W.

    Raises:
        ValueError: a word is not a task, a rank has two lines, or a line has no tasks; the message
            names `file` and the line.
    """
    order: dict[int, list[Task]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0]
        if not content.strip():
            continue
        labelled = _LABEL.fullmatch(content)
        label, tasks = labelled.groups() if labelled else (str(len(order)), content)
        if not label.isdecimal():
            raise ValueError(f"{file}:{number}: '{label}' is not a rank; write 0: 0F0 0B0")
        rank = int(label)
        if rank in order:
            raise ValueError(f"{file}:{number}: rank {rank} has a line already")
        words = [word for word in tasks.replace(",", " ").split() if word.strip(".")]
        if not words:
            raise ValueError(f"{file}:{number}: rank {rank} has no tasks; leave its line out")
        try:
            order[rank] = _with_inputs([Task.parse(word) for word in words])
        except ValueError as error:
            raise ValueError(f"{file}:{number}: {error}") from error
    if not order:
        raise ValueError(f"{file}: no rank has a line")
    return order


def _with_inputs(tasks: Sequence[Task]) -> list[Task]:
    """The tasks, with B added right ahead of each W without a B."""
    present = set(tasks)
    completed: list[Task] = []
    for task in tasks:
        if task.action is Action.WEIGHT and task.beside(Action.BACKWARD) not in present:
            completed.append(task.beside(Action.BACKWARD))
        completed.append(task)
    return completed


def format_table(order: Order) -> str:
    """Write an order as a table; `parse_table` reads it back."""
    lines = (f"{rank}: {' '.join(map(str, order[rank]))}" for rank in sorted(order))
    return "\n".join(lines) + "\n"


def table_pipeline(text: str, file: str = "table") -> Pipeline:
    """The pipeline of a table, in which each stage is on the rank that runs it.

    Raises:
        ValueError: the text is not a table, or leaves out a stage or a microbatch.
    """
    order = parse_table(text, file)
    homes = {task.stage: rank for rank, tasks in order.items() for task in tasks}
    microbatches = {task.microbatch for tasks in order.values() for task in tasks}
    for noun, numbers in (("stage", homes.keys()), ("microbatch", microbatches)):
        # Only numbers below the count are tried, as a number in the text may be huge.
        for number in range(len(numbers)):
            if number not in numbers:
                raise ValueError(
                    f"{file}: no rank runs {noun} {number}, but there is {max(numbers)}"
                )
    return Pipeline(tuple(homes[stage] for stage in sorted(homes)), len(microbatches))


def table_order(pipeline: Pipeline, text: str, file: str) -> Order:
    """The order of a table; `validate` compares it with the pipeline."""
    return parse_table(text, file)
