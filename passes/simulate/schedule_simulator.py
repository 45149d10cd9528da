"""Run a schedule on paper: what it takes, where it idles, and what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...ir.pipeline.costs import Costs
from ...ir.pipeline.order import Order
from ...ir.pipeline.timing import Timeline, play


@dataclass(frozen=True, slots=True)
class Simulation:
    """The simulated run of an order of tasks.

    Attributes:
        ranks: those that host a stage, in the order in which a microbatch first comes to them.
        makespan: the longest time from a rank's first start to its last end, in milliseconds.
        end: when the last task ends, in milliseconds after the first has started.
        busy: for each of `ranks`, for how many milliseconds it works.
        peak_activations: for each of `ranks`, of how many microbatches it holds the activations at
            most, counted as in `Timeline.peak`.
        timeline: when each task runs.
    """

    ranks: tuple[int, ...]
    makespan: float
    end: float
    busy: tuple[float, ...]
    peak_activations: tuple[float, ...]
    timeline: Timeline

    @property
    def bubble_ratio(self) -> float:
        """The share of the makespan for which a rank, on average, does not work."""
        if not self.makespan:
            return 0.0
        return 1.0 - sum(self.busy) / len(self.busy) / self.makespan


def simulate(
    order: Order, stage_ranks: Sequence[int], microbatches: int, costs: Costs | None = None
) -> Simulation:
    """Run an order of tasks on paper, in time linear in their number.

    The model is that of `ir/pipeline/timing.py`.

    Args:
        order: for each rank its tasks, as a schedule makes and checks them.
        stage_ranks: the rank of each stage.
        microbatches: how many there are.
        costs: of each stage's tasks and of transfers; one unit for each task without them.

    Raises:
        OrderDeadlock: the ranks come to wait for each other.
        ValueError: the costs are not for so many stages.
    """
    costs = costs or Costs()
    timeline = play(order, stage_ranks, microbatches, costs)
    ranks = tuple(dict.fromkeys(stage_ranks))
    return Simulation(
        ranks,
        timeline.makespan,
        timeline.end,
        tuple(timeline.busy(rank) for rank in ranks),
        tuple(timeline.peak(rank, costs.mw) for rank in ranks),
        timeline,
    )
