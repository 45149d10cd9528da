"""Pipeline schedules: a pipeline in, an order of tasks for each rank out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ....ir.attributes import Action, Task
from ....ir.pipeline.order import ACTIONS, Order, TaskRow, numbers, splits_backward


class ScheduleError(ValueError):
    """An order is not a schedule of a pipeline, or the stages' ranks do not suit a schedule."""

    __module__ = "cg"  # the public name, which tracebacks show


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The shape of a pipelined step.

    Stage s+1 may use what any of the stages 0..s made for the same microbatch, so a stage's
    number is also its depth. A rank may host several stages, next to each other or not.

    Attributes:
        stage_ranks: the rank of each stage.
        microbatches: the number of microbatches, which may be less than the number of stages.
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
    def ranks(self) -> tuple[int, ...]:
        """The ranks that host a stage, in the order in which a microbatch first comes to them."""
        return tuple(dict.fromkeys(self.stage_ranks))

    @property
    def depths(self) -> tuple[int, ...]:
        """For each stage, how often a microbatch changes ranks on its way there.

        Neighbouring stages on one rank run back to back, as one. So the depth, and not the number
        of the stage, says when a stage's turn comes.
        """
        depth = 0
        depths = [0]
        for before, after in zip(self.stage_ranks, self.stage_ranks[1:], strict=False):
            depth += before != after
            depths.append(depth)
        return tuple(depths)

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """The stages, with neighbours on one rank together, which run back to back as one."""
        runs = groupby(range(self.stages), key=self.stage_ranks.__getitem__)
        return tuple(tuple(run) for _, run in runs)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A named rule that orders the tasks of any pipeline.

    Attributes:
        name: its name in `by_name`, in dumps and in rows of benchmarks.
        order: the rule, a pure function of a pipeline and the options.
        options: the keyword arguments of the rule.
        splits: whether its orders may have tasks W. A step is then compiled with backwards in two
            halves; if an order has no W after all, each W follows its B.
        whole: the ranks whose backwards are compiled as one all the same. Nothing is left for their
            tasks W.
    """

    name: str
    order: Callable[..., Order] = field(repr=False)
    options: tuple[tuple[str, Any], ...] = ()
    splits: bool = False
    whole: frozenset[int] = frozenset()

    def __str__(self) -> str:
        return self.name

    def __call__(self, pipeline: Pipeline) -> Order:
        """Order the tasks of `pipeline`, and check the result.

        Raises:
            TypeError: the result of the rule does not have the form of an order.
            ScheduleError: the rule does not apply to this pipeline, or its result is not a schedule
                of the pipeline.
        """
        order = self.order(pipeline, **dict(self.options))
        _check_form(order, self.name)
        validate(pipeline, order, self.name)
        if not self.splits and splits_backward(order):
            raise ScheduleError(
                f"schedule '{self.name}' has tasks W, but does not say so; make it with "
                "Schedule(..., splits=True)"
            )
        return order


def spell(pipeline: Pipeline, chunks: Sequence[Sequence[int]], word: Iterable[str]) -> TaskRow:
    """The tasks of one rank, written as a word: `FFBFBB`, or `F0 F1 B1 B0` as a list.

    A letter is an action and a chunk; without a number it is for the first chunk. Each letter takes
    the chunk's next microbatch, so each action goes through the microbatches in order; letters
    behind the last microbatch are left out. In a chunk of several stages, forwards run down the
    stages and backwards up.

    Args:
        pipeline: the pipeline of the tasks.
        chunks: the stages of each chunk that the rank hosts.
        word: the letters.
    """
    count = pipeline.microbatches
    upcoming: dict[str, list[Iterator[int]]] = {}
    for chunk, stages in enumerate(chunks):
        for index, action in enumerate(ACTIONS):
            ordered = stages if action is Action.FORWARD else tuple(reversed(stages))
            lanes = [index * pipeline.stages + stage for stage in ordered]
            upcoming[f"{action.value}{chunk}"] = [
                iter(range(lane * count, (lane + 1) * count)) for lane in lanes
            ]
    upcoming |= {action.value: upcoming[f"{action.value}0"] for action in ACTIONS}
    tasks = [
        number
        for letter in word
        for lane in upcoming[letter]
        if (number := next(lane, None)) is not None
    ]
    return TaskRow(tasks, pipeline.stages, count)


def from_clock(pipeline: Pipeline, clock: Mapping[tuple[Action, int], Sequence[int]]) -> Order:
    """Give each rank its tasks by ascending clock.

    Tasks of one rank with equal clocks run oldest microbatch first, backwards before forwards,
    forwards down the pipeline and backwards up. The orders of the ranks cannot block each other if
    no task has a smaller clock than a task that it needs, and if dependent tasks with equal clocks
    are on one rank: then all ranks follow the global order of tasks by clock.

    Args:
        pipeline: the pipeline of the tasks.
        clock: for each action and stage, the clocks of the microbatches.
    """

    def turn(lane: tuple[Action, int]) -> tuple[str, int]:
        action, stage = lane
        return action.value, stage if action is Action.FORWARD else -stage

    count = pipeline.microbatches
    order: dict[int, TaskRow] = {}
    for rank in pipeline.ranks:
        keys: list[int] = []
        tasks: list[int] = []
        lanes = (lane for lane in clock if pipeline.stage_ranks[lane[1]] == rank)
        for action, stage in sorted(lanes, key=turn):
            keys += [time * count + mb for mb, time in enumerate(clock[action, stage])]
            first = (ACTIONS.index(action) * pipeline.stages + stage) * count
            tasks += range(first, first + count)
        # The sort is stable: among equal keys, the order of the lanes stays.
        by_key = sorted(range(len(keys)), key=keys.__getitem__)
        order[rank] = TaskRow([tasks[index] for index in by_key], pipeline.stages, count)
    return order


def _check_form(order: Any, name: str) -> None:
    """Refuse the result of a user's rule if it does not have the form of an order."""
    form = "a rule gives a dict: for each rank the list of its tasks, as Task.parse('2F0') makes"
    if not isinstance(order, Mapping):
        raise TypeError(f"schedule '{name}' gives {_kind(order)}; {form}")
    for rank, tasks in order.items():
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise TypeError(f"schedule '{name}' has {rank!r} for a rank; {form}")
        if isinstance(tasks, TaskRow):
            continue
        if isinstance(tasks, str) or not isinstance(tasks, Sequence):
            raise TypeError(f"schedule '{name}' gives rank {rank} {_kind(tasks)}; {form}")
        for task in tasks:
            if not isinstance(task, Task):
                raise TypeError(f"schedule '{name}' gives rank {rank} the task {task!r}; {form}")


def _kind(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def validate(pipeline: Pipeline, order: Order, name: str) -> None:
    """Check that `order` is a schedule of `pipeline`.

    Each rank must run the tasks of its own stages and no others. For each stage and microbatch it
    must run F once, then B once. If there is any W, each B must be followed by one W.

    Raises:
        ScheduleError: `order` breaks a rule; the message names the schedule, the rank and the task.
    """
    count, cells = pipeline.microbatches, pipeline.stages * pipeline.microbatches
    done = bytearray(cells)  # for each stage and microbatch, how many of F, B and W have run
    for rank, tasks in order.items():
        _check_range(pipeline, rank, tasks, name)
        foreign = [home != rank for home in pipeline.stage_ranks]
        for number in numbers(tasks, pipeline.stages, count):
            action, cell = divmod(number, cells)
            if done[cell] != action or foreign[cell // count]:
                raise _misplaced(pipeline, rank, number, done, name)
            done[cell] = action + 1
    needed = 3 if splits_backward(order) else 2
    if cells != done.count(needed):
        cell = next(cell for cell in range(cells) if done[cell] != needed)
        stage, mb = divmod(cell, count)
        missing = Task(stage, ACTIONS[done[cell]], mb)
        rank = pipeline.stage_ranks[stage]
        raise ScheduleError(f"schedule '{name}': rank {rank} never runs {missing}")


def _check_range(pipeline: Pipeline, rank: int, tasks: Sequence[Task], name: str) -> None:
    shape = (pipeline.stages, pipeline.microbatches)
    if isinstance(tasks, TaskRow) and (tasks.stages, tasks.microbatches) == shape:
        return
    for task in tasks:
        if not task.stage < pipeline.stages or not task.microbatch < pipeline.microbatches:
            raise ScheduleError(
                f"schedule '{name}': rank {rank} runs {task}, but the pipeline has stages "
                f"0..{pipeline.stages - 1} and microbatches 0..{pipeline.microbatches - 1}"
            )


def _misplaced(
    pipeline: Pipeline, rank: int, number: int, done: Sequence[int], name: str
) -> ScheduleError:
    """The error about a misplaced task; `done` counts the tasks that ran before it, by cell."""
    cells = pipeline.stages * pipeline.microbatches
    (task,) = TaskRow((number,), pipeline.stages, pipeline.microbatches)
    action, cell = divmod(number, cells)
    home = pipeline.stage_ranks[task.stage]
    where = f"schedule '{name}': rank {rank} runs {task}"
    if home != rank:
        return ScheduleError(f"{where}, but stage {task.stage} is on rank {home}")
    if done[cell] > action:
        return ScheduleError(f"{where} twice")
    needed = Task(task.stage, ACTIONS[action - 1], task.microbatch)
    hint = "; each W has its B, also of the first stage" if needed.action is Action.BACKWARD else ""
    return ScheduleError(f"{where} before {needed}{hint}")
