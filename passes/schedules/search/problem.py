"""The problem of a search for an order: parts on ranks, times, and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ....ir.attributes import Action
from ....ir.pipeline.costs import Costs, Memory
from ....ir.pipeline.order import Order, TaskRow
from ..orders.base import Pipeline

ROUNDING = 1e-9
"""The tolerance, as a share, in comparisons of sums of times and of memory."""


@dataclass(frozen=True, slots=True)
class OrderProblem:
    """The problem of finding an order for a pipeline.

    A *part* is a run of neighbouring stages on one rank, which run back to back. Ranks are numbered
    in the order in which a microbatch first comes to them. A *lane* is an action and a part, with
    the number `action * parts + part`, where F, B, W are 0, 1, 2.

    Attributes:
        pipeline: the stages on their ranks.
        split: whether W is a task of its own.
        rank_of: the rank of each part.
        hosted: the parts of each rank, ascending.
        durations: by lane, the time of a task in milliseconds; without a split, B includes W, and W
            takes no time.
        transfers: the time from each part to the next, in both directions; 0 on one rank.
        grows: by lane, the memory that a task takes, negative if it frees memory.
        needs: for each part, the memory that B needs in addition while it runs, as it recomputes or
            leaves more to W than F has taken; -inf if it needs none, and can always run.
        capacities: the memory of each rank, in the unit of `grows`.
        kept: for each part, the share of F's memory that is not freed before W.
        offsets: the start of each rank, if the first microbatch never waits.
    """

    pipeline: Pipeline
    split: bool
    rank_of: tuple[int, ...]
    hosted: tuple[tuple[int, ...], ...]
    durations: tuple[float, ...]
    transfers: tuple[float, ...]
    grows: tuple[float, ...]
    needs: tuple[float, ...]
    capacities: tuple[float, ...]
    kept: tuple[float, ...]
    offsets: tuple[float, ...]

    @staticmethod
    def of(
        pipeline: Pipeline, costs: Costs, memory: float | Sequence[float], split: bool = True
    ) -> OrderProblem:
        """The problem of a pipeline with some costs and memory.

        Args:
            pipeline: any stages on any ranks.
            costs: the costs of tasks, transfers and memory.
            memory: the memory of every rank, or of each in the order of `pipeline.ranks`; in bytes
                if `costs.activation_bytes` is given, else in microbatches.
            split: whether W is a task of its own.
        """
        ranks, parts = pipeline.ranks, pipeline.parts
        number = {rank: index for index, rank in enumerate(ranks)}
        rank_of = tuple(number[pipeline.stage_ranks[part[0]]] for part in parts)
        hosted = tuple(
            tuple(k for k, rank in enumerate(rank_of) if rank == r) for r in range(len(ranks))
        )
        times = [
            sum(costs.of(action, stage, split) for stage in part)
            if split or action is not Action.WEIGHT
            else 0.0
            for action in (Action.FORWARD, Action.BACKWARD, Action.WEIGHT)
            for part in parts
        ]
        ends = [part[-1] for part in parts[:-1]]
        transfers = (*(costs.between(stage) for stage in ends), 0.0)
        sizes = [_memory(costs, part, split) for part in parts]
        if isinstance(memory, Sequence):
            capacities = tuple(float(capacity) for capacity in memory)
        elif costs.activation_bytes is None:
            counts = [sum(len(parts[k]) for k in rank_parts) for rank_parts in hosted]
            capacities = tuple(memory * count for count in counts)
        else:
            capacities = (float(memory),) * len(ranks)
        # More memory than all microbatches take is of no use.
        still = [max(size.before, size.after) for size in sizes]
        most = [
            pipeline.microbatches * sum(still[k] for k in rank_parts)
            + max(sizes[k].during - still[k] for k in rank_parts)
            for rank_parts in hosted
        ]
        capacities = tuple(map(min, capacities, most))
        starts: dict[int, float] = {}
        clock = 0.0
        for k, rank in enumerate(rank_of):
            starts.setdefault(rank, clock)
            clock += times[k] + transfers[k]
        return OrderProblem(
            pipeline,
            split,
            rank_of,
            hosted,
            tuple(times),
            transfers,
            (
                *(size.before for size in sizes),
                *(size.after - size.before for size in sizes),
                *(-size.after for size in sizes),
            ),
            tuple(
                size.during - size.before if size.during > size.before else -math.inf
                for size in sizes
            ),
            capacities,
            tuple(min(1.0, size.after / size.before) if size.before else 0.0 for size in sizes),
            tuple(starts[rank] for rank in range(len(ranks))),
        )

    @property
    def parts(self) -> int:
        return len(self.rank_of)

    @property
    def ranks(self) -> int:
        return len(self.hosted)

    @property
    def microbatches(self) -> int:
        return self.pipeline.microbatches

    @property
    def tasks(self) -> int:
        """The number of tasks, where each part counts as one stage."""
        return (3 if self.split else 2) * self.parts * self.microbatches

    def with_microbatches(self, count: int) -> OrderProblem:
        """The same problem with another number of microbatches."""
        return replace(self, pipeline=Pipeline(self.pipeline.stage_ranks, count))

    def work(self, rank: int) -> float:
        """The time of one microbatch on a rank, in milliseconds."""
        lanes = (action * self.parts + k for action in range(3) for k in self.hosted[rank])
        return math.fsum(self.durations[lane] for lane in lanes)

    def reserve(self, rank: int) -> float:
        """The memory that a rank keeps free for B; 0 if no B needs any."""
        return max(0.0, *(self.needs[k] for k in self.hosted[rank]))

    def lacking(self) -> tuple[int, float] | None:
        """A rank without memory for one microbatch, and the memory needed; None if all have it."""
        for rank, parts in enumerate(self.hosted):
            needed = sum(self.grows[k] for k in parts) + self.reserve(rank)
            if needed > self.capacities[rank] * (1.0 + ROUNDING) + ROUNDING:
                return rank, needed
        return None

    def order(self, lanes: Sequence[Sequence[int]]) -> Order:
        """The order of tasks from the lanes of each rank; lanes take microbatches in order."""
        pipeline = self.pipeline
        stages, count = pipeline.stages, pipeline.microbatches
        # A part's forwards run down its stages, and its backwards up.
        runs: list[tuple[int, ...]] = []
        for action in range(3):
            for part in pipeline.parts:
                ordered = part if action == 0 else part[::-1]
                runs.append(tuple((action * stages + stage) * count for stage in ordered))
        order: dict[int, TaskRow] = {}
        upcoming = [0] * (3 * self.parts)
        for rank, word in zip(pipeline.ranks, lanes, strict=True):
            numbers: list[int] = []
            append = numbers.append
            for lane in word:
                microbatch = upcoming[lane]
                upcoming[lane] = microbatch + 1
                for first in runs[lane]:
                    append(first + microbatch)
            order[rank] = TaskRow(numbers, stages, count)
        return order


def _memory(costs: Costs, part: Sequence[int], split: bool) -> Memory:
    """The memory of a microbatch on a part, whose B runs the part's stages one after the other."""
    memories = [costs.memory(stage, split) for stage in part]
    held = most = sum(memory.before for memory in memories)
    for memory in reversed(memories):
        most = max(most, held + memory.during - memory.before)
        held += memory.after - memory.before
    return Memory(sum(memory.before for memory in memories), most, held)
