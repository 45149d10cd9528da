"""Find orders that are as short as memory allows, with a lower bound of the makespan."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from operator import itemgetter
from random import Random

from ....ir.pipeline.costs import Costs, PerStage
from ....ir.pipeline.order import Order
from ....ir.pipeline.timing import Timeline, play
from ..orders.base import Pipeline
from .bound import MOST_TASKS, find_windows, lower_bound
from .improve import Search, Start, Trial, Urgency, following, quality
from .known_orders import known_orders
from .list_scheduling import Listed, list_schedule
from .policies import BACKWARDS_FIRST, SEEDS, Policy, drawn
from .problem import ROUNDING, OrderProblem
from .recompute import sets_to_try
from .stretch import CUTS, PATIENCES, STEP, fewer_microbatches, stretched

CHOICES = 4
"""The number of best orders that are kept; more hardly ever help."""
_LARGE = 1_000_000
"""The most tasks for list schedules; beyond, only some known orders are played."""
_NEAR = 0.002
"""The gap, as a share of the bound, that is good enough if further list schedules take long."""
_LESS = {
    False: "auto(remat=True), or cg.remat(actor.method) in the step, keeps less of it",
    True: "even as stages recompute; smaller microbatches take less",
}
"""The advice where not one microbatch fits, by whether stages recompute."""


@dataclass(frozen=True)
class Found:
    """An order that a search has found.

    Attributes:
        order: the tasks of each rank.
        makespan: the longest time from a rank's first start to its last end, in milliseconds.
        end: the end of the last task, in milliseconds.
        peak: the most memory that a rank holds, as a share of its capacity.
        bound: a lower bound of the makespan of all orders, in milliseconds.
        source: the name of a known schedule, or a word for the search's own orders.
        trials: the number of orders that were tried in all.
        remat: the stages that recompute. The bound is for orders in which these recompute.
    """

    order: Order
    makespan: float
    end: float
    peak: float
    bound: float
    source: str
    trials: int
    remat: tuple[int, ...] = ()

    @property
    def gap(self) -> float:
        """How far the makespan is above the bound, as a share of the bound."""
        return self.makespan / self.bound - 1.0 if self.bound else 0.0

    def __str__(self) -> str:
        return (
            f"{100 * self.gap:.1f} % above the bound, {self.makespan:.6g} ms of {self.bound:.6g}, "
            f"in {100 * self.peak:.0f} % of the memory: {self.source}, of {self.trials} tried"
            f"{self._recomputing}"
        )

    @property
    def _recomputing(self) -> str:
        if not self.remat:
            return ""
        stages = ", ".join(map(str, self.remat))
        return f"; stages {stages} recompute" if "," in stages else f"; stage {stages} recomputes"


def find_orders(
    pipeline: Pipeline,
    costs: Costs,
    memory: float | tuple[float, ...],
    *,
    splits: bool,
    seed: int,
    seconds: float | None,
    remat: bool,
) -> tuple[Found, ...]:
    """The best orders that a search finds, best first: at least one, at most `CHOICES`.

    The search tries known schedules that fit into the memory, list schedules by many policies, and
    hill climbs from the best of these. The best order is never longer than a known schedule that
    fits. For many microbatches, the search runs with few, and then stretches the middle of the
    orders that it finds, or uses their policies again. Without `seconds` the result depends on the
    arguments alone.

    Args:
        pipeline: any stages on any ranks.
        costs: the costs of tasks, transfers and memory.
        memory: the memory of each rank, as in `OrderProblem.of`.
        splits: whether W may be a task of its own.
        seed: the seed of the search's random moves.
        seconds: the time of the search; None: a number of trials that depends on the size of the
            pipeline.
        remat: whether to choose the stages that recompute, by a search for each of several sets of
            stages. Without it, the stages in `costs.remat` recompute.

    Raises:
        ValueError: not one microbatch fits into the memory, or the costs are not for these stages,
            or have no `mr`, which `remat` needs.
    """
    times = costs.tf, costs.tb, costs.tw, costs.tcomm
    memories = costs.mw, costs.activation_bytes, costs.weight_bytes, costs.mr, costs.remat
    return _find(pipeline, (*times, *memories), memory, splits, seed, seconds, remat)


_Given = PerStage | None
_Fields = tuple[
    PerStage, PerStage, PerStage, PerStage, float, _Given, _Given, _Given, tuple[int, ...]
]
"""The fields of costs that a search needs, in a form that can be hashed, as `Costs` cannot."""


@lru_cache(maxsize=16)
def _find(
    pipeline: Pipeline,
    fields: _Fields,
    memory: float | tuple[float, ...],
    splits: bool,
    seed: int,
    seconds: float | None,
    remat: bool,
) -> tuple[Found, ...]:
    costs = Costs(*fields)
    sets = sets_to_try(pipeline, costs, memory, splits) if remat else [costs.remat]
    share = None if seconds is None else seconds / len(sets)
    best: tuple[Found, ...] = ()
    trials = 0
    for chosen in sets:
        paid = replace(costs, remat=chosen)
        orders = _Finder(pipeline, paid, memory, splits, seed, share).run()
        trials += orders[0].trials
        if not best or orders[0].makespan < best[0].makespan * (1.0 - ROUNDING):
            best = orders
    return tuple(replace(order, trials=trials) for order in best)


class _Finder:
    """One search: its problem, and the best orders so far."""

    def __init__(
        self,
        pipeline: Pipeline,
        costs: Costs,
        memory: float | tuple[float, ...],
        splits: bool,
        seed: int,
        seconds: float | None,
    ) -> None:
        self.problem = OrderProblem.of(pipeline, costs, memory, splits)
        self.costs = costs
        self.random = Random(seed)
        self.seconds = seconds
        self.until = None if seconds is None else time.monotonic() + seconds
        self.trials = 0
        self.best: list[tuple[tuple[float, float, float], Order, str]] = []
        self._check_memory()

    def run(self) -> tuple[Found, ...]:
        problem = self.problem
        windows = find_windows(problem) if problem.tasks <= MOST_TASKS else None
        bound = lower_bound(problem, windows)
        for name, order in known_orders(problem, few=problem.tasks > _LARGE):
            self._rate(order, name)
        if not self._is_best(bound):
            count = fewer_microbatches(problem)
            small = problem.with_microbatches(count)
            if small.tasks <= _LARGE:
                self._search(small, bound)
        if not self.best:
            self._one_at_a_time()
        return tuple(
            Found(order, span, end, peak, min(bound, span), source, self.trials, self.costs.remat)
            for (span, end, peak), order, source in self.best
        )

    def _search(self, small: OrderProblem, bound: float) -> None:
        """Search with list schedules, for fewer microbatches, and apply the result to all."""
        problem = self.problem
        is_whole = small.microbatches == problem.microbatches
        windows = find_windows(small)
        least = bound if is_whole else lower_bound(small, windows)
        starts: list[Start] = [(policy, None) for policy in SEEDS]
        for _, order in known_orders(small, few=True):
            urgency = _urgency(small, self._play(small, order))
            starts.append((following(0.5), urgency))
        search = Search(small, windows, least, self.random)
        most = self._most(small, 1.0)
        trials = search.run(starts, self._budget(most, 0.5))
        if is_whole:
            self._finish(search, starts, trials, most // 2)
        elif trials:
            self._stretch(small, _distinct(trials), bound)
        self.trials += search.count

    def _stretch(self, small: OrderProblem, trials: Sequence[Trial], bound: float) -> None:
        """Stretch the best orders for fewer microbatches, and improve the stretched orders."""
        problem = self.problem
        longer = small.with_microbatches(small.microbatches + STEP)
        ways: list[tuple[float, int, Policy, Listed, float]] = []
        for trial in trials[:2]:
            for patience, cut in product(PATIENCES, CUTS):
                policy = following(patience)
                urgency = stretched(small, trial.listed, cut, STEP)
                listed = list_schedule(longer, policy.rule(longer, urgency))
                self.trials += 1
                if listed is not None:
                    span = round(max(listed.spans(longer)), 9)
                    ways.append((span, len(ways), policy, trial.listed, cut))
        more = problem.microbatches - small.microbatches
        best = [
            (policy, stretched(small, listed, cut, more))
            for _, _, policy, listed, cut in sorted(ways, key=itemgetter(0, 1))[:3]
        ]
        if problem.tasks > MOST_TASKS:
            for policy, urgency in best:
                if self._is_best(bound * (1.0 + _NEAR)):
                    break
                listed = list_schedule(problem, policy.rule(problem, urgency))
                self.trials += 1
                if listed is not None:
                    self._rate(problem.order(listed.lanes), "a search")
            return
        starts: list[Start] = list(best)
        policies = [trial.policy for trial in trials if trial.boosts is None]
        firsts = [policy for policy in policies if policy in SEEDS]
        starts += [(policy, None) for policy in dict.fromkeys([*policies[:2], *firsts[:5]])]
        search = Search(problem, find_windows(problem), bound, self.random)
        trials = search.run(starts, self._budget(self._most(problem, 0.3), 0.5))
        self._finish(search, starts, trials, 0)
        self.trials += search.count

    def _finish(
        self, search: Search, starts: Sequence[Start], trials: Sequence[Trial], more: int
    ) -> None:
        """Climb again, from the best trial and from policies that suit few pipelines.

        Args:
            search: the search.
            starts: the starts of the climb before.
            trials: the trials of the climb before, best first.
            more: how many policies to draw at random, unless the best is near the bound. Half as
                many moves follow.
        """
        best = trials[0] if trials else None
        if best is not None and best.span <= search.bound * (1.0 + _NEAR):
            more = 0
        policies = _others(starts) + [drawn(self.random) for _ in range(more)]
        budget = self._budget(len(policies) + more // 2, 1.0)
        climbed = search.run([(policy, None) for policy in policies], budget, best)
        for trial in _distinct(sorted([*trials, *climbed], key=quality))[:CHOICES]:
            self._rate(self.problem.order(trial.listed.lanes), "a search")

    def _most(self, problem: OrderProblem, share: float) -> int:
        """The number of trials for a share of the search of a problem."""
        size = max(1, problem.tasks)
        return max(8, min(500, int(share * 220_000 * (size / 800) ** 0.65 / size)))

    def _budget(self, most: int, share: float) -> Callable[[int], bool]:
        """A function that says, after a number of trials, whether to make one more.

        Args:
            most: the most trials, if the search has no limit of time.
            share: the share of the remaining time, if it has one.
        """
        if self.until is None:
            return lambda count: count < most
        now = time.monotonic()
        until = now + share * (self.until - now)
        return lambda _: time.monotonic() < until

    def _play(self, problem: OrderProblem, order: Order) -> Timeline:
        pipeline = problem.pipeline
        return play(order, pipeline.stage_ranks, pipeline.microbatches, self.costs)

    def _rate(self, order: Order, source: str) -> None:
        """Keep an order if it fits into the memory and is among the best."""
        self.trials += source != "a search"
        timeline = self._play(self.problem, order)
        ranks = self.problem.pipeline.ranks
        held = [timeline.held(rank, self.costs) for rank in ranks]
        limits = self.problem.capacities
        if any(h > c * (1.0 + ROUNDING) + ROUNDING for h, c in zip(held, limits, strict=True)):
            return
        peak = max((h / c for h, c in zip(held, limits, strict=True) if c), default=0.0)
        # Times are sums of the same numbers in different orders, so equal times may differ a bit.
        key = round(timeline.makespan, 9), round(timeline.end, 9), round(peak, 9)
        if any(
            key == known_key and order == known_order for known_key, known_order, _ in self.best
        ):
            return
        self.best.append((key, order, source))
        self.best.sort(key=lambda entry: entry[0])
        del self.best[CHOICES:]

    def _is_best(self, bound: float) -> bool:
        return bool(self.best) and self.best[0][0][0] <= bound * (1.0 + 1e-6)

    def _check_memory(self) -> None:
        lacking = self.problem.lacking()
        if lacking is not None:
            rank, needed = lacking
            raise ValueError(
                f"schedule 'auto': rank {self.problem.pipeline.ranks[rank]} may hold "
                f"{self.problem.capacities[rank]:g}, but one microbatch takes {needed:g}; "
                f"{_LESS[bool(self.costs.remat)]}"
            )

    def _one_at_a_time(self) -> None:
        """Rate the order that runs one microbatch after the other, which always fits."""
        problem = self.problem
        width = [
            [*parts, *(lane for k in reversed(parts) for lane in self._backward(k))]
            for parts in problem.hosted
        ]
        self._rate(problem.order([word * problem.microbatches for word in width]), "one at a time")

    def _backward(self, part: int) -> list[int]:
        n = self.problem.parts
        return [n + part, 2 * n + part] if self.problem.split else [n + part]


def _others(starts: Sequence[Start]) -> list[Policy]:
    """The policies of the zero-bubble heuristic that are not among the starts of a climb."""
    begun = {policy for policy, boosts in starts if boosts is None}
    return [policy for policy in BACKWARDS_FIRST if policy not in begun]


def _distinct(trials: Sequence[Trial]) -> list[Trial]:
    """The first trial of each span, in order."""
    firsts: dict[float, Trial] = {}
    for trial in trials:
        firsts.setdefault(round(trial.span, 9), trial)
    return list(firsts.values())


def _urgency(problem: OrderProblem, timeline: Timeline) -> Urgency:
    """The urgency with which list scheduling follows an order: earlier tasks are more urgent."""
    n, m = problem.parts, problem.microbatches
    stages = problem.pipeline.stages
    urgency = [[0.0] * m for _ in range(3 * n)]
    # The lane in the problem, by lane in the timeline, of each stage that runs first in its part.
    firsts: dict[int, int] = {}
    for k, part in enumerate(problem.pipeline.parts):
        firsts[part[0]] = k
        firsts[stages + part[-1]] = n + k
        firsts[2 * stages + part[-1]] = 2 * n + k
    for rank, numbers in timeline.rows.items():
        for number, start in zip(numbers, timeline.starts[rank], strict=True):
            lane, microbatch = divmod(number, m)
            if lane in firsts:
                urgency[firsts[lane]][microbatch] = -start
    if problem.split and not timeline.split:
        for k in range(n):
            urgency[2 * n + k] = [start - problem.durations[n + k] for start in urgency[n + k]]
    return urgency
