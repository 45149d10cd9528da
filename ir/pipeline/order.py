"""The order in which ranks run the tasks of a pipeline, compact enough for millions of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias, overload

from ..attributes import Action, Task

Order: TypeAlias = Mapping[int, Sequence[Task]]
"""For each rank that hosts a stage, the tasks in the order in which the rank runs them."""

ACTIONS: tuple[Action, ...] = (Action.FORWARD, Action.BACKWARD, Action.WEIGHT)
"""The actions in the order in which a microbatch takes them on a stage."""


class TaskRow(Sequence[Task]):
    """The tasks of one rank, stored as integers; a `Task` is made when it is read.

    The *number* of a task is `(action * stages + stage) * microbatches + microbatch`, with F, B, W
    as 0, 1, 2. The *lane* of a task is `number // microbatches`: tasks of one action and stage have
    one lane, and consecutive numbers.

    Attributes:
        numbers: the numbers of the tasks, in order.
        stages, microbatches: how many the pipeline has.
    """

    __slots__ = ("microbatches", "numbers", "stages")

    def __init__(self, numbers: Sequence[int], stages: int, microbatches: int) -> None:
        self.numbers = numbers
        self.stages = stages
        self.microbatches = microbatches

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> TaskRow: ...
    def __getitem__(self, index: int | slice) -> Task | TaskRow:
        if isinstance(index, slice):
            return TaskRow(self.numbers[index], self.stages, self.microbatches)
        return self._task(self.numbers[index])

    def __iter__(self) -> Iterator[Task]:
        return map(self._task, self.numbers)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        shape = (self.stages, self.microbatches)
        if isinstance(other, TaskRow) and (other.stages, other.microbatches) == shape:
            return list(self.numbers) == list(other.numbers)
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Row({' '.join(map(str, self))})"

    def _task(self, number: int) -> Task:
        lane, microbatch = divmod(number, self.microbatches)
        action, stage = divmod(lane, self.stages)
        return Task(stage, ACTIONS[action], microbatch)


def numbers(tasks: Sequence[Task], stages: int, microbatches: int) -> Sequence[int]:
    """The numbers of a rank's tasks, as in `TaskRow`; all must be tasks of the pipeline."""
    if isinstance(tasks, TaskRow) and (tasks.stages, tasks.microbatches) == (stages, microbatches):
        return tasks.numbers
    return [
        (_INDEX[task.action] * stages + task.stage) * microbatches + task.microbatch
        for task in tasks
    ]


_INDEX = {action: index for index, action in enumerate(ACTIONS)}


def splits_backward(order: Order) -> bool:
    """True if an order has tasks W, so that B is the gradient of the inputs alone."""
    for tasks in order.values():
        if isinstance(tasks, TaskRow):
            split = max(tasks.numbers, default=0) >= 2 * tasks.stages * tasks.microbatches
        else:
            split = any(task.action is Action.WEIGHT for task in tasks)
        if split:
            return True
    return False
