"""Run a schedule on paper: its time, its idle time and its memory."""

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
        ranks: the ranks that host a stage, in the order in which a microbatch first comes to them.
        makespan: the longest time from a rank's first start to its last end, in milliseconds.
        end: the end of the last task, in milliseconds after the start of the first.
        busy: for each of `ranks`, the milliseconds for which it works.
        peak_activations: for each of `ranks`, the most microbatches whose activations it holds at
            once, counted as in `Timeline.peak`.
        timeline: the times of all tasks.
        traffic: the bytes that a rank receives for its stored parameters, as a multiple of their
            bytes; 0 without stored parameters.
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
        """The share of the makespan for which ranks do not work, on average."""
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
        order: the tasks of each rank, as a schedule makes and checks them.
        stage_ranks: the rank of each stage.
        microbatches: the number of microbatches.
        costs: the costs of tasks and transfers; without them each task takes one unit.
        storing: how stages are stored, if groups of ranks store them in pieces. The time of a rank
            then includes its first gather and its last reduction.

    Raises:
        OrderDeadlock: the ranks come to wait for each other.
        ValueError: the costs are not for this number of stages.
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
    """The most microbatches whose activations a rank holds; stages that recompute count less."""
    if not costs.remat:
        return timeline.peak(rank, costs.mw)
    counted = replace(costs, activation_bytes=None, weight_bytes=None)
    return timeline.held(rank, counted) / timeline.stage_ranks.count(rank)
