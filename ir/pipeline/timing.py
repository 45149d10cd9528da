"""Time the tasks of a pipeline by a virtual clock, where each rank runs its tasks in order.

In the model, a rank runs one task at a time, in order, each as soon as it can. F of a stage needs F
of the stage before it, and B needs B of the stage after it, both for the same microbatch. A value
from another rank arrives `tcomm` after it was made; the transfer keeps neither rank busy.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from ..attributes import Action, Task
from .costs import Costs
from .order import ACTIONS, Order, TaskRow, numbers, splits_backward


class OrderDeadlock(ValueError):
    """The ranks of an order of tasks would wait for each other for ever."""


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """Facts about the tasks of each lane; `TaskRow` defines lanes.

    A task may make the input of a task on a neighbouring stage, its *consumer*.

    Attributes:
        durations: the time that a task takes.
        hops: the consumer's number less the task's number; 0 if there is no consumer.
        delays: the time from the end of the task to the arrival of its result at the consumer.
        consumers: the rank of the consumer.
    """

    durations: list[float]
    hops: list[int]
    delays: list[float]
    consumers: list[int]

    @staticmethod
    def of(stage_ranks: Sequence[int], microbatches: int, costs: Costs, split: bool) -> TaskFacts:
        """The lanes of a pipeline whose stages have these ranks."""
        stages = len(stage_ranks)
        lanes = TaskFacts([], [], [], [])
        for action in ACTIONS:
            step = {Action.FORWARD: 1, Action.BACKWARD: -1, Action.WEIGHT: 0}[action]
            for stage, rank in enumerate(stage_ranks):
                neighbour = stage + step if 0 <= stage + step < stages else stage
                consumer = stage_ranks[neighbour]
                lanes.durations.append(costs.of(action, stage, split))
                lanes.hops.append((neighbour - stage) * microbatches)
                lanes.consumers.append(consumer)
                crosses = consumer != rank
                lanes.delays.append(costs.between(min(stage, neighbour)) if crosses else 0.0)
        return lanes


@dataclass(frozen=True, slots=True)
class Timeline:
    """The start of every task of an order.

    Attributes:
        stage_ranks, microbatches: the pipeline.
        split: whether B and W are tasks of their own.
        rows: for each rank the numbers of its tasks.
        starts: for each rank the start of each of its tasks.
        durations: for each lane the time of a task.
    """

    stage_ranks: tuple[int, ...]
    microbatches: int
    split: bool
    rows: Mapping[int, Sequence[int]]
    starts: Mapping[int, array[float]]
    durations: Sequence[float]

    def span(self, rank: int) -> float:
        """The time from the start of a rank's first task to the end of its last."""
        row, starts = self.rows[rank], self.starts[rank]
        if not row:
            return 0.0
        return starts[-1] + self.durations[row[-1] // self.microbatches] - starts[0]

    @property
    def makespan(self) -> float:
        """The longest span of a rank."""
        return max(map(self.span, self.rows))

    @property
    def end(self) -> float:
        """The end of the last task of all ranks."""
        ends = (self.starts[rank][0] + self.span(rank) for rank, row in self.rows.items() if row)
        return max(ends, default=0.0)

    def busy(self, rank: int) -> float:
        """The time for which a rank works."""
        rounds = range(len(self.stage_ranks) * (3 if self.split else 2))
        lanes = (lane for lane in rounds if self.home(lane) == rank)
        return self.microbatches * sum(self.durations[lane] for lane in lanes)

    def peak(self, rank: int, mw: float = 1.0) -> float:
        """The most microbatches whose activations a rank holds at once.

        F takes 1, and B gives it back. If W is a task of its own, B gives back all but `mw`, and W
        gives back the rest. Each of the v stages of a rank counts 1/v.
        """
        stages = len(self.stage_ranks)
        left = mw if self.split else 0.0
        # Sums of integers are exact, and faster.
        exact = int(left) if left in (0.0, 1.0) else left
        deltas = [1] * stages + [exact - 1] * stages + [-exact] * stages
        changes = (deltas[number // self.microbatches] for number in self.rows[rank])
        return max(accumulate(changes), default=0) / self.stage_ranks.count(rank)

    def held(self, rank: int, costs: Costs) -> float:
        """The most memory that a rank holds at once, by `costs.memory`.

        It is in bytes if `costs.activation_bytes` is given; else each stage of a microbatch counts
        1.
        """
        memories = [costs.memory(stage, self.split) for stage in range(len(self.stage_ranks))]
        deltas = [m.before for m in memories] + [m.after - m.before for m in memories]
        deltas += [-m.after for m in memories]
        lanes = (number // self.microbatches for number in self.rows[rank])
        if all(m.during <= max(m.before, m.after) for m in memories):
            return max(accumulate(deltas[lane] for lane in lanes), default=0.0)
        stages = len(memories)
        held = most = 0.0
        for lane in lanes:
            if stages <= lane < 2 * stages:
                memory = memories[lane - stages]
                most = max(most, held + memory.during - memory.before)
            held += deltas[lane]
            most = max(most, held)
        return most

    def home(self, lane: int) -> int:
        """The rank of a lane's tasks."""
        return self.stage_ranks[lane % len(self.stage_ranks)]

    def tasks(self, rank: int) -> Iterator[tuple[Task, float, float]]:
        """The tasks of a rank, each with its start and end."""
        row = self.rows[rank]
        named = TaskRow(row, len(self.stage_ranks), self.microbatches)
        for task, number, start in zip(named, row, self.starts[rank], strict=True):
            yield task, start, start + self.durations[number // self.microbatches]


Hold: TypeAlias = Callable[[int, int, float], float]
"""Takes a rank, the number of its next task, and its earliest start; returns its actual start."""


def play(
    order: Order,
    stage_ranks: Sequence[int],
    microbatches: int,
    costs: Costs | None = None,
    hold: Hold | None = None,
) -> Timeline:
    """Run an order on paper, in time linear in the number of its tasks.

    Args:
        order: the tasks of this pipeline; of each stage and microbatch F comes before B, and B
            before W.
        stage_ranks: the rank of each stage.
        microbatches: the number of microbatches.
        costs: the costs of tasks and transfers; without them each task takes one unit.
        hold: puts off tasks that wait for something else; called once for each task.

    Raises:
        OrderDeadlock: the ranks come to wait for each other; the message shows for which tasks.
    """
    stages = len(stage_ranks)
    split = splits_backward(order)
    lanes = TaskFacts.of(stage_ranks, microbatches, costs or Costs(), split)
    rows = {rank: numbers(tasks, stages, microbatches) for rank, tasks in order.items()}
    starts: dict[int, array[float]] = {rank: array("d") for rank in rows}
    heads = _advance(rows, starts, lanes, _sources(stages, microbatches, split), microbatches, hold)
    stuck = {rank: number for rank, number in heads.items() if number >= 0}
    if stuck:
        raise _deadlock(stuck, stages, microbatches)
    return Timeline(tuple(stage_ranks), microbatches, split, rows, starts, lanes.durations)


_UNKNOWN = -1.0


def _sources(stages: int, microbatches: int, split: bool) -> array[float]:
    """For each task, the arrival of its input from another stage, as far as that is known."""
    unknown = array("d", [_UNKNOWN]) * ((stages - 1) * microbatches)
    known = array("d", [0.0]) * microbatches
    # F of the first stage, B of the last one, and W of all stages need no input.
    return known + unknown + unknown + known + known * (stages if split else 0)


def _advance(
    rows: Mapping[int, Sequence[int]],
    starts: Mapping[int, array[float]],
    lanes: TaskFacts,
    arrivals: array[float],
    microbatches: int,
    hold: Hold | None,
) -> dict[int, int]:
    """Fill in `starts`; return for each rank the number of the task that it is stuck at, or -1.

    A rank runs until it comes to a task whose arrival is not known. It goes on once another rank
    has run the task that makes the input. The order in which ranks take turns changes no time.
    """
    durations, hops, delays, consumers = (
        lanes.durations,
        lanes.hops,
        lanes.delays,
        lanes.consumers,
    )
    upcoming = {rank: iter(row) for rank, row in rows.items()}
    heads = {rank: next(row, -1) for rank, row in upcoming.items()}
    clocks = dict.fromkeys(rows, 0.0)
    runnable = list(rows)
    while runnable:
        rank = runnable.pop()
        number, clock = heads[rank], clocks[rank]
        row, append = upcoming[rank], starts[rank].append
        heads[rank] = -1
        while number >= 0:
            start = arrivals[number]
            if start < 0.0:
                break
            if start < clock:
                start = clock
            if hold is not None:
                start = hold(rank, number, start)
            append(start)
            lane = number // microbatches
            clock = start + durations[lane]
            hop = hops[lane]
            if hop:
                following = number + hop
                arrivals[following] = clock + delays[lane]
                consumer = consumers[lane]
                if heads[consumer] == following:
                    runnable.append(consumer)
            number = next(row, -1)
        heads[rank], clocks[rank] = number, clock
    return heads


def _deadlock(stuck: dict[int, int], stages: int, microbatches: int) -> OrderDeadlock:
    lines = []
    for rank, number in stuck.items():
        forward = ACTIONS[number // microbatches // stages] is Action.FORWARD
        needed = number - microbatches if forward else number + microbatches
        task, before = TaskRow((number, needed), stages, microbatches)
        lines.append(f"  rank {rank} stays at {task}, which needs {before}")
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"  and so on, {len(lines)} ranks in all"]
    return OrderDeadlock("\n".join(["the ranks wait for each other for ever:", *lines]))


_SHOWN = 8
