"""Find orders that are as short as memory allows, and a bound of how short that can be."""

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
from .problem import ROUNDING, Problem
from .recompute import sets_to_try
from .stretch import CUTS, PATIENCES, STEP, fewer_microbatches, stretched

CHOICES = 4
"""How many of the best orders are kept; more hardly ever bring anything."""
_LARGE = 1_000_000
"""Beyond so many tasks only some known orders are played, and no list schedule is made."""
_NEAR = 0.002
"""A gap of this share is good enough where a list schedule, or many of them, would take long."""
_LESS = {
    False: "auto(remat=True), or cg.remat(actor.method) in the step, keeps less of it",
    True: "even as stages recompute; smaller microbatches take less",
}
"""What to do where not one microbatch fits, by whether stages recompute."""


@dataclass(frozen=True)
class Found:
    """An order that a search has found.

    Attributes:
        order: the tasks of each rank.
        makespan: the longest time from a rank's first start to its last end, in milliseconds.
        end: when the last task ends.
        peak: the most that a rank holds, as a share of what it may.
        bound: what no order can be shorter than.
        source: what the order comes from: a known schedule, or the search's own.
        trials: how many orders were tried in all.
        remat: the stages that recompute. The bound is that of orders in which these do.
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
        """By which share of the bound the makespan is above it."""
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
    splits: bool = True,
    seed: int = 0,
    seconds: float | None = None,
    remat: bool = False,
) -> tuple[Found, ...]:
    """The best orders that a search finds, best first: at least one, at most `CHOICES`.

    Known schedules that fit into the memory, list schedules by many policies, and what hill
    climbs make of the best of these. None is longer than a known schedule that fits. For many
    microbatches the search is done with few, and a part of what it finds is repeated, or its
    policies are used again. Without `seconds` the result depends on the arguments alone.

    Args:
        pipeline: any stages on any ranks.
        costs: of tasks, transfers and memory.
        memory: what each rank may hold, as `Problem.of` takes it.
        splits: whether W may be a task of its own.
        seed: what the search draws its moves from.
        seconds: for how long to search; as many trials as the size of the pipeline asks for,
            without.
        remat: whether to choose which stages recompute, too. The search is then done for some sets
            of stages; without, those of `costs.remat` do.

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
"""What a search needs of costs; it can be hashed, and they cannot."""


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
    """One search: what it looks for, and the best that it has found so far."""

    def __init__(
        self,
        pipeline: Pipeline,
        costs: Costs,
        memory: float | tuple[float, ...],
        splits: bool,
        seed: int,
        seconds: float | None,
    ) -> None:
        self.problem = Problem.of(pipeline, costs, memory, splits)
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

    def _search(self, small: Problem, bound: float) -> None:
        """List schedules of a problem with fewer microbatches, and what they give for all."""
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

    def _stretch(self, small: Problem, trials: Sequence[Trial], bound: float) -> None:
        """Stretch the best orders for fewer microbatches, and improve what comes of that."""
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
        """Climb again, from the best and policies that hardly any pipeline wants.

        Args:
            search, starts, trials: the climb before, what it began with, and what it has found.
            more: how many policies to draw, if the best is not near the bound. Half as many moves
                follow.
        """
        best = trials[0] if trials else None
        if best is not None and best.span <= search.bound * (1.0 + _NEAR):
            more = 0
        policies = _others(starts) + [drawn(self.random) for _ in range(more)]
        budget = self._budget(len(policies) + more // 2, 1.0)
        climbed = search.run([(policy, None) for policy in policies], budget, best)
        for trial in _distinct(sorted([*trials, *climbed], key=quality))[:CHOICES]:
            self._rate(self.problem.order(trial.listed.lanes), "a search")

    def _most(self, problem: Problem, share: float) -> int:
        """How many trials a share of the search of a problem may be."""
        size = max(1, problem.tasks)
        return max(8, min(500, int(share * 220_000 * (size / 800) ** 0.65 / size)))

    def _budget(self, most: int, share: float) -> Callable[[int], bool]:
        """Says after a number of trials whether there is time for one more.

        Args:
            most: how many trials there may be.
            share: instead, of the time that is left, where there is a budget of time.
        """
        if self.until is None:
            return lambda count: count < most
        now = time.monotonic()
        until = now + share * (self.until - now)
        return lambda _: time.monotonic() < until

    def _play(self, problem: Problem, order: Order) -> Timeline:
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
        # Times are sums of the same numbers in other orders: what is equal may differ a little.
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
        """Each microbatch after the other: what fits wherever one microbatch does."""
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
    """The policies of the zero-bubble heuristic that a climb did not begin with."""
    begun = {policy for policy, boosts in starts if boosts is None}
    return [policy for policy in BACKWARDS_FIRST if policy not in begun]


def _distinct(trials: Sequence[Trial]) -> list[Trial]:
    """One trial of each span, best first."""
    firsts: dict[float, Trial] = {}
    for trial in trials:
        firsts.setdefault(round(trial.span, 9), trial)
    return list(firsts.values())


def _urgency(problem: Problem, timeline: Timeline) -> Urgency:
    """What makes list scheduling follow an order: whatever starts earlier is more urgent."""
    n, m = problem.parts, problem.microbatches
    stages = problem.pipeline.stages
    urgency = [[0.0] * m for _ in range(3 * n)]
    # The lane of each action and stage, where the stage is the first of its part to run.
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
