"""Run a schedule on paper: what it takes, where it idles, and what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...ir.pipeline.costs import Costs
from ...ir.pipeline.order import Order
from ...ir.pipeline.timing import Timeline, play
from .stored_stages import Gathers, Storing, traffic


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
        traffic: bytes that a rank receives for parameters that are stored in pieces, in units of
            their bytes; 0 where none are.
    """

    ranks: tuple[int, ...]
    makespan: float
    end: float
    busy: tuple[float, ...]
    peak_activations: tuple[float, ...]
    timeline: Timeline
    traffic: float = 0.0

    @property
    def bubble_ratio(self) -> float:
        """The share of the makespan for which a rank, on average, does not work."""
        if not self.makespan:
            return 0.0
        return 1.0 - sum(self.busy) / len(self.busy) / self.makespan


def simulate(
    order: Order,
    stage_ranks: Sequence[int],
    microbatches: int,
    costs: Costs | None = None,
    storing: Storing | None = None,
) -> Simulation:
    """Run an order of tasks on paper, in time linear in their number.

    The model is that of `ir/pipeline/timing.py`.

    Args:
        order: for each rank its tasks, as a schedule makes and checks them.
        stage_ranks: the rank of each stage.
        microbatches: how many there are.
        costs: of each stage's tasks and of transfers; one unit for each task without them.
        storing: how stages are stored, if groups of ranks have them in pieces. The first gather of
            a rank and its last reduction count to its time.

    Raises:
        OrderDeadlock: the ranks come to wait for each other.
        ValueError: the costs are not for so many stages.
    """
    costs = costs or Costs()
    gathers = None
    if storing is not None and storing.members > 1:
        gathers = Gathers(storing, costs, len(stage_ranks), microbatches)
    hold = None if gathers is None else gathers.hold
    timeline = play(order, stage_ranks, microbatches, costs, hold)
    ranks = tuple(dict.fromkeys(stage_ranks))
    makespan, end = timeline.makespan, timeline.end
    if gathers is not None:
        spans = gathers.spans(timeline).values()
        makespan = max(last - first for first, last in spans)
        end = max(last for _, last in spans)
    return Simulation(
        ranks,
        makespan,
        end,
        tuple(timeline.busy(rank) for rank in ranks),
        tuple(_peak(timeline, rank, costs) for rank in ranks),
        timeline,
        0.0 if storing is None else traffic(storing, microbatches),
    )


def _peak(timeline: Timeline, rank: int, costs: Costs) -> float:
    """Of how many microbatches a rank holds the activations; a stage that recomputes holds less."""
    if not costs.remat:
        return timeline.peak(rank, costs.mw)
    counted = replace(costs, activation_bytes=None, weight_bytes=None)
    return timeline.held(rank, counted) / timeline.stage_ranks.count(rank)
