"""Stages whose parameters are stored in pieces, on paper: gathers, reductions and their traffic."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...ir.attributes import Action
from ...ir.pipeline.costs import Costs
from ...ir.pipeline.timing import Timeline


@dataclass(frozen=True)
class Storing:
    """Parameters in pieces, on groups of ranks in the place of the ranks of a pipeline.

    Attributes:
        members: ranks of a group.
        keep: `step`: each stage is gathered once, and its gradients are reduced once, behind its
            last backward. `task`: for each F and B, and after each B, or each W where there are
            any.
    """

    members: int = 1
    keep: str = "step"

    @property
    def share(self) -> float:
        """The share of what is gathered that a rank receives of others."""
        return (self.members - 1) / self.members


@dataclass(slots=True)
class _Queue:
    """The gathers of one rank, one behind the other.

    Attributes:
        free: when the last one is over.
        before: when the task before has started; the next gather is issued then.
        gathered: the stages that have been gathered.
        first: when the first one was issued.
    """

    free: float = 0.0
    before: float | None = None
    gathered: set[int] = field(default_factory=set)
    first: float | None = None


class Gathers:
    """Puts off tasks until the parameters of their stage are gathered.

    A gather is issued when the task before it starts, the first one just as early as it has to be.
    """

    def __init__(self, storing: Storing, costs: Costs, stages: int, microbatches: int) -> None:
        self._storing = storing
        self._costs = costs
        self._stages = stages
        self._microbatches = microbatches
        self._queues: dict[int, _Queue] = {}

    def hold(self, rank: int, number: int, start: float) -> float:
        """When a task starts that could start then; as `Hold`."""
        queue = self._queues.setdefault(rank, _Queue())
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
        """For each rank when its first gather is issued, and when its last reduction is over."""
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
    """The bytes that a rank receives for its parameters in a step, in units of their bytes.

    2 (f - 1) / f with `step`, for a gather and a reduction; with `task` two gathers and a reduction
    for each microbatch.
    """
    times = 2 if storing.keep == "step" else 3 * microbatches
    return times * storing.share
