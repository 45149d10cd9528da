"""What a pipeline schedule is: a pipeline in, an order of tasks for each rank out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ...ir.attributes import Action, Task

Order: TypeAlias = dict[int, list[Task]]
"""For each rank that hosts a stage, its tasks in the order in which it runs them."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The shape of a pipelined step.

    Stage s+1 may use what any of the stages 0..s made for the same microbatch, so a stage's
    number is also its depth. A rank may host several stages, next to each other or not.

    Attributes:
        stage_ranks: the rank of each stage.
        microbatches: how many there are; any number, also fewer than there are stages.
    """

    stage_ranks: tuple[int, ...]
    microbatches: int

    def __post_init__(self) -> None:
        if not self.stage_ranks:
            raise ValueError("a pipeline needs at least one stage")
        if self.microbatches < 1:
            raise ValueError(f"a pipeline needs at least one microbatch, not {self.microbatches}")
        if min(self.stage_ranks) < 0:
            raise ValueError(f"the ranks of the stages must not be negative: {self.stage_ranks}")

    @property
    def stages(self) -> int:
        return len(self.stage_ranks)

    @property
    def depths(self) -> tuple[int, ...]:
        """For each stage, how often the work changes ranks on its way there.

        Neighbouring stages on one rank run back to back, as one; so this, and not the number of
        the stage, says when a stage's turn comes.
        """
        depth = 0
        depths = [0]
        for before, after in zip(self.stage_ranks, self.stage_ranks[1:], strict=False):
            depth += before != after
            depths.append(depth)
        return tuple(depths)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A named rule that orders the tasks of any pipeline.

    Attributes:
        name: what `by_name` finds it by, and what dumps and benchmark rows call it.
        order: the rule, a pure function.
    """

    name: str
    order: Callable[[Pipeline], Order] = field(repr=False)

    def __str__(self) -> str:
        return self.name

    def __call__(self, pipeline: Pipeline) -> Order:
        """Order the tasks of `pipeline`, and check the result.

        Raises:
            ValueError: the rule's result is not a schedule of this pipeline.
        """
        order = self.order(pipeline)
        validate(pipeline, order, self.name)
        return order


def from_clock(pipeline: Pipeline, clock: Mapping[Task, int]) -> Order:
    """Give each rank its tasks by ascending clock.

    Tasks of one rank and one clock run oldest microbatch first, forwards down the pipeline and
    backwards up. If the clock of a task is never under that of a task that it needs, and if
    equal clocks of dependent tasks stay on one rank, the orders of the ranks cannot block each
    other: sorting all tasks by clock is a global order that they all follow.
    """

    def key(task: Task) -> tuple[int, int, str, int]:
        downwards = task.action is Action.FORWARD
        stage = task.stage if downwards else -task.stage
        return (clock[task], task.microbatch, task.action.value, stage)

    order: Order = {rank: [] for rank in pipeline.stage_ranks}
    for task in sorted(clock, key=key):
        order[pipeline.stage_ranks[task.stage]].append(task)
    return order


def validate(pipeline: Pipeline, order: Mapping[int, Sequence[Task]], name: str) -> None:
    """Check that `order` is a schedule of `pipeline`.

    Every rank runs the tasks of its own stages and no others; for each stage and microbatch it
    runs F once, then B once; then W at most once, and where one W is, all are.

    Raises:
        ValueError: it is not; the message names the schedule, the rank and the task.
    """
    counts: Counter[Task] = Counter()
    split = any(task.action is Action.WEIGHT for tasks in order.values() for task in tasks)
    for rank, tasks in order.items():
        for task in tasks:
            _check_task(pipeline, rank, task, counts, name)
            counts[task] += 1
    for stage, rank in enumerate(pipeline.stage_ranks):
        for mb in range(pipeline.microbatches):
            for action in Action:
                task = Task(stage, action, mb)
                if (action is not Action.WEIGHT or split) and not counts[task]:
                    raise ValueError(f"schedule '{name}': rank {rank} never runs {task}")


_BEFORE = {Action.BACKWARD: Action.FORWARD, Action.WEIGHT: Action.BACKWARD}


def _check_task(pipeline: Pipeline, rank: int, task: Task, seen: Counter[Task], name: str) -> None:
    """Check one task of `rank`, given the tasks that ran before it."""
    where = f"schedule '{name}': rank {rank}"
    if not task.stage < pipeline.stages or not task.microbatch < pipeline.microbatches:
        raise ValueError(
            f"{where} runs {task}, but the pipeline has stages 0..{pipeline.stages - 1} "
            f"and microbatches 0..{pipeline.microbatches - 1}"
        )
    home = pipeline.stage_ranks[task.stage]
    if home != rank:
        raise ValueError(f"{where} runs {task}, but stage {task.stage} is on rank {home}")
    if seen[task]:
        raise ValueError(f"{where} runs {task} twice")
    if task.action in _BEFORE:
        needed = Task(task.stage, _BEFORE[task.action], task.microbatch)
        if not seen[needed]:
            raise ValueError(f"{where} runs {task} before {needed}")
