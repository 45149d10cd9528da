"""Simulate stages with stored parameters: their gathers, their reductions and the traffic."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...ir.attributes import Action
from ...ir.pipeline.costs import Costs
from ...ir.pipeline.timing import Timeline


@dataclass(frozen=True)
class Storing:
    """Stored parameters, where each rank of a pipeline is replaced by a group of ranks.

    Attributes:
        members: the number of ranks of a group.
        keep: with `step`, each stage is gathered once, and its gradients are reduced once, behind
            its last backward. With `task`, it is gathered for each F and each B, and its gradients
            are reduced after each B or, if there are W, after each W.
    """

    members: int = 1
    keep: str = "step"

    @property
    def share(self) -> float:
        """The share of gathered parameters that a rank receives from others."""
        return (self.members - 1) / self.members


@dataclass(slots=True)
class _GatherQueue:
    """The gathers of one rank, which run one behind the other.

    Attributes:
        free: the end of the last gather.
        before: the start of the previous task, when the next gather is issued; None before tasks.
        gathered: the stages that have been gathered.
        first: the time at which the first gather was issued.
    """

    free: float = 0.0
    before: float | None = None
    gathered: set[int] = field(default_factory=set)
    first: float | None = None


class Gathers:
    """Puts off tasks until the parameters of their stage are gathered.

    A gather is issued when the task before it starts. The first one is issued as late as possible.
    """

    def __init__(self, storing: Storing, costs: Costs, stages: int, microbatches: int) -> None:
        self._storing = storing
        self._costs = costs
        self._stages = stages
        self._microbatches = microbatches
        self._queues: dict[int, _GatherQueue] = {}

    def hold(self, rank: int, number: int, start: float) -> float:
        """The actual start of a task that could start at `start`, as in `Hold`."""
        queue = self._queues.setdefault(rank, _GatherQueue())
        action, stage = divmod(number // self._microbatches, self._stages)
        is_per_task = self._storing.keep == "task" and action < 2
        if is_per_task or (action == 0 and stage not in queue.gathered):
            queue.gathered.add(stage)
            time = self._costs.tgather
            issued = max(start - time, 0.0) if queue.before is None else queue.before
            queue.first = issued if queue.first is None else queue.first
            queue.free = max(queue.free, issued) + time
            start = max(start, queue.free)
        queue.before = start
        return start

    def spans(self, timeline: Timeline) -> dict[int, tuple[float, float]]:
        """For each rank the time of its first gather, and the end of its last task or reduction."""
        spans = {}
        for rank, row in timeline.rows.items():
            if not row:
                continue
            queue, free = self._queues[rank], 0.0
            closing = Action.WEIGHT if timeline.split else Action.BACKWARD
            left = dict.fromkeys(range(self._stages), self._microbatches)
            end = 0.0
            for task, _, end in timeline.tasks(rank):
                if task.action is closing:
                    left[task.stage] -= 1
                    if self._storing.keep == "task" or not left[task.stage]:
                        free = max(free, end) + self._costs.treduce
            spans[rank] = (queue.first or 0.0, max(end, free))
        return spans


def traffic(storing: Storing, microbatches: int) -> float:
    """The bytes that a rank receives for its parameters in a step, as a multiple of their bytes.

    On f ranks, a gather or a reduction counts (f - 1) / f. There is one of each with `step`. With
    `task` there are two gathers and a reduction for each microbatch.
    """
    times = 2 if storing.keep == "step" else 3 * microbatches
    return times * storing.share
