"""Improve a list schedule: vary its policy, and make urgent what would fill the idle time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from .bound import Windows
from .list_scheduling import Listed, list_schedule
from .policies import Policy
from .problem import ROUNDING, Problem

Urgency = list[list[float]]
Start = tuple[Policy, Urgency | None]
"""What a search begins with: a policy, and what is added to its urgency."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A list schedule and what it was made by.

    Attributes:
        span: the longest span of a rank.
        excess: by how much the spans of all ranks are over the bound, in sum.
        policy: what the tasks' urgency comes from.
        boosts: what has been added to it, by lane and microbatch.
        listed: the schedule.
    """

    span: float
    excess: float
    policy: Policy
    boosts: Urgency | None
    listed: Listed

    def beats(self, other: Trial) -> bool:
        """True if this is shorter, or as short with less idle time."""
        slack = ROUNDING * (1.0 + other.span)
        if self.span < other.span - slack:
            return True
        return self.span <= other.span + slack and self.excess <= other.excess


def quality(trial: Trial) -> tuple[float, float]:
    """What to sort trials by, best first."""
    return round(trial.span, 9), trial.excess


def following(patience: float) -> Policy:
    """A policy in which nothing counts but what is added to it."""
    return Policy(patience=(patience, patience, patience))


class Search:
    """Hill climbs, each from the best of some policies.

    Args:
        problem: what has to be ordered.
        windows: heads and tails of its tasks.
        bound: a lower bound of the span; the search ends where that is reached.
        random: what decides between moves.

    Attributes:
        count: how many trials there were.
    """

    def __init__(self, problem: Problem, windows: Windows, bound: float, random: Random) -> None:
        self.problem = problem
        self.windows = windows
        self.bound = bound
        self.random = random
        self.count = 0

    def run(
        self, starts: Iterable[Start], goes_on: Callable[[int], bool], known: Trial | None = None
    ) -> list[Trial]:
        """The best trials of a climb, best first; none if nothing to begin with gives an order.

        Args:
            starts: what the climb begins with.
            goes_on: whether there is time for another trial after so many.
            known: what it begins with besides. A start that is sure to be longer than the best so
                far is then given up, which takes a fraction of the time.
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
        """A list schedule; None if the policy gives no order, or one longer than a known one."""
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
        """The first trial of each kind: by tails, backwards first, and after a known order."""
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
        """Make urgent a task that could have filled idle time, with all that it needs.

        The idle time is that of a rank whose span is among the longest. What could have filled it
        runs later on that rank, and its head is before the end of the idle time.
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
        """Tasks of a rank after a place in its order, that could start before a time."""
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
