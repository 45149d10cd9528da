"""Improve a list schedule: vary its policy, and raise the urgency of tasks that fill idle time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from .bound import Windows
from .list_scheduling import Listed, list_schedule
from .policies import Policy
from .problem import ROUNDING, OrderProblem

Urgency = list[list[float]]
Start = tuple[Policy, Urgency | None]
"""The start of a search: a policy, and an urgency to add to that of the policy."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A list schedule, with its policy.

    Attributes:
        span: the longest span of a rank.
        excess: the sum over ranks of their spans in excess of the bound.
        policy: the policy that gives tasks their urgency.
        boosts: the urgency added to that of the policy, by lane and microbatch.
        listed: the schedule.
    """

    span: float
    excess: float
    policy: Policy
    boosts: Urgency | None
    listed: Listed

    def beats(self, other: Trial) -> bool:
        """True if this trial is shorter than another, or as short with no more excess."""
        slack = ROUNDING * (1.0 + other.span)
        if self.span < other.span - slack:
            return True
        return self.span <= other.span + slack and self.excess <= other.excess


def quality(trial: Trial) -> tuple[float, float]:
    """The sort key of trials, best first."""
    return round(trial.span, 9), trial.excess


def following(patience: float) -> Policy:
    """A policy without urgency of its own, for following the urgency that is added."""
    return Policy(patience=(patience, patience, patience))


class Search:
    """Hill climbs, each from the best of several policies.

    Args:
        problem: the problem to order.
        windows: the heads and tails of its tasks.
        bound: a lower bound of the span; a climb ends once it is reached.
        random: the source of random moves.

    Attributes:
        count: the number of trials so far.
    """

    def __init__(
        self, problem: OrderProblem, windows: Windows, bound: float, random: Random
    ) -> None:
        self.problem = problem
        self.windows = windows
        self.bound = bound
        self.random = random
        self.count = 0

    def run(
        self, starts: Iterable[Start], goes_on: Callable[[int], bool], known: Trial | None = None
    ) -> list[Trial]:
        """The trials of a climb, best first; none if no start gives an order.

        Args:
            starts: the starts of the climb.
            goes_on: says, after a number of trials, whether to make another.
            known: a trial to begin with as well. A start that is sure to be longer than the best
                trial so far is then given up early, which saves most of its time.
        """
        begun = self.count
        trials = [] if known is None else [known]
        for policy, boosts in starts:
            if trials and (self._is_best(trials[-1]) or not goes_on(self.count - begun)):
                break
            trial = self.attempt(policy, boosts, known)
            if trial is not None:
                trials.append(trial)
                known = None if known is None else trial
        trials.sort(key=quality)
        tops = self._kinds(trials)
        while tops and goes_on(self.count - begun) and not self._is_best(tops[0]):
            at = 0 if self.random.random() < 0.7 else self.random.randrange(len(tops))
            moved = self._move(tops[at])
            if moved is not None and moved.beats(tops[at]):
                tops[at] = moved
                tops.sort(key=quality)
        return sorted([*tops, *trials], key=quality)

    def attempt(
        self, policy: Policy, boosts: Urgency | None, known: Trial | None = None
    ) -> Trial | None:
        """A trial of a policy; None if it gives no order, or a longer one than a known trial."""
        self.count += 1
        urgency = policy.urgency(self.problem, self.windows)
        if boosts is not None:
            urgency = [
                [a + b for a, b in zip(lane, more, strict=True)]
                for lane, more in zip(urgency, boosts, strict=True)
            ]
        longest = math.inf if known is None else known.span
        listed = list_schedule(self.problem, policy.rule(self.problem, urgency), longest)
        if listed is None:
            return None
        spans = listed.spans(self.problem)
        excess = sum(span - self.bound for span in spans if span > self.bound)
        return Trial(max(spans), excess, policy, boosts, listed)

    def _is_best(self, trial: Trial) -> bool:
        return trial.span <= self.bound * (1.0 + 1e-6)

    def _kinds(self, trials: Sequence[Trial]) -> list[Trial]:
        """The first trial of each kind: by tails or not, and with boosts or without."""
        kinds: dict[tuple[bool, bool], Trial] = {}
        for trial in trials:
            kinds.setdefault((trial.policy.tails, trial.boosts is None), trial)
        return list(kinds.values())

    def _move(self, trial: Trial) -> Trial | None:
        if self.random.random() < 0.4:
            return self.attempt(trial.policy.varied(self.random), trial.boosts, trial)
        boosts = self._boosted(trial)
        return None if boosts is None else self.attempt(trial.policy, boosts, trial)

    def _boosted(self, trial: Trial) -> Urgency | None:
        """Raise the urgency of a task that could have filled idle time, and of those it needs.

        The idle time is that of a rank whose span is among the longest. A task could have filled it
        if it runs later on that rank, and its head is before the end of the idle time.
        """
        problem, random = self.problem, self.random
        n, m = problem.parts, problem.microbatches
        spans = trial.listed.spans(problem)
        longest = max(spans)
        least = self.bound + 0.7 * (longest - self.bound)
        rank = random.choice([rank for rank, span in enumerate(spans) if span >= least])
        lanes, starts = trial.listed.lanes[rank], trial.listed.starts[rank]
        gaps = []
        for at in range(1, len(lanes)):
            idle = starts[at] - starts[at - 1] - problem.durations[lanes[at - 1]]
            if idle > ROUNDING * longest:
                gaps.append((at, idle))
        if not gaps:
            return None
        at, idle = random.choices(gaps, [idle for _, idle in gaps])[0]
        fillers = self._fillers(rank, lanes, at, starts[at])
        if not fillers:
            return None
        lane, first = fillers[int(random.random() ** 2 * len(fillers))]
        unit = max(problem.work(host) for host in range(problem.ranks))
        more = unit * random.choice((0.1, 0.3, 1.0, 3.0))
        upto = min(m, first + random.choice((1, 1, 2, 4, 8)))
        boosts = [list(row) for row in trial.boosts or [[0.0] * m for _ in range(3 * n)]]
        needed = list(range(lane + 1)) if lane < n else list(range(lane, 2 * n))
        if lane >= n and random.random() < 0.5:
            needed += range(n)
        for number in needed:
            boost = boosts[number]
            for i in range(first, upto):
                boost[i] += more
        return boosts

    def _fillers(
        self, rank: int, lanes: Sequence[int], at: int, until: float
    ) -> list[tuple[int, int]]:
        """The tasks of a rank that run later in its order, and could start before a time.

        Args:
            rank: the rank.
            lanes: the lanes that it runs, in order.
            at: the place in the order behind which to look.
            until: the time.

        Returns:
            Pairs of a lane and a microbatch.
        """
        n = self.problem.parts
        counts = [0] * (3 * n)
        for lane in lanes[:at]:
            counts[lane] += 1
        fillers: list[tuple[int, int]] = []
        seen: set[int] = set()
        for lane in lanes[at : at + 40]:
            i = counts[lane]
            counts[lane] += 1
            if lane >= 2 * n or (lane in seen and self.random.random() < 0.7):
                continue
            if self.windows.heads[lane][i] < until - self.problem.offsets[rank]:
                fillers.append((lane, i))
                seen.add(lane)
                if len(fillers) == 6:
                    break
        return fillers
