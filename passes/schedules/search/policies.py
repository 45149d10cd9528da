"""Policies: rules for the urgency of tasks, in a few numbers that a search can vary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random

from .bound import Windows
from .list_scheduling import Rule
from .problem import ROUNDING, OrderProblem

Triple = tuple[float, float, float]
"""A number each for F, B and W."""

_NONE: Triple = (0.0, 0.0, 0.0)
_TIE = 1e-6
"""The urgency added for each later part, so that its tasks come first among equals."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A rule for the urgency of tasks, which is a sum of terms.

    The unit is the work of a microbatch on the busiest rank.

    Attributes:
        tails: whether a task's tail counts: the least time from its end to the end of the window.
        action: the urgency of each F, B and W.
        chunk: the urgency added for each earlier part of the same rank.
        place: the urgency added for each earlier rank, divided by the number of ranks.
        turn: the urgency subtracted for each earlier microbatch.
        patience: as in `Rule`.
        swing: as in `Rule`.
        ahead: how far the forwards of a part may be ahead of its backwards, beyond the forwards
            that fill the time until its first B; None: as far as memory allows.
    """

    tails: bool = False
    action: Triple = _NONE
    chunk: Triple = _NONE
    place: Triple = _NONE
    turn: Triple = _NONE
    patience: Triple = _NONE
    swing: float = 0.0
    ahead: int | None = None

    def urgency(self, problem: OrderProblem, windows: Windows) -> list[list[float]]:
        """The urgency of tasks, by lane and microbatch."""
        n, m = problem.parts, problem.microbatches
        unit = max(problem.work(rank) for rank in range(problem.ranks)) or 1.0
        urgencies = []
        for action in range(3):
            for k in range(n):
                rank = problem.rank_of[k]
                chunk = problem.hosted[rank].index(k)
                base = self.action[action] + chunk * self.chunk[action] + k * _TIE
                base += self.place[action] * rank / problem.ranks
                slope = -unit * self.turn[action]
                base *= unit
                if self.tails:
                    tails = windows.tails[action * n + k]
                    urgencies.append([base + slope * i + tail for i, tail in enumerate(tails)])
                elif slope:
                    urgencies.append([base + slope * i for i in range(m)])
                else:
                    urgencies.append([base] * m)
        return urgencies

    def rule(self, problem: OrderProblem, urgency: Sequence[Sequence[float]]) -> Rule:
        """The rule of this policy, with an urgency that may be adjusted."""
        unit = max(problem.work(rank) for rank in range(problem.ranks)) or 1.0
        return Rule(urgency, self.patience, self.swing * unit, self._limits(problem))

    def _limits(self, problem: OrderProblem) -> Sequence[float]:
        if self.ahead is None:
            return ()
        n = problem.parts
        limits = [math.inf] * n
        there_and_back = 0.0
        for k in reversed(range(n)):
            tf = problem.durations[k]
            there_and_back += tf
            if tf:
                filling = math.ceil(there_and_back / tf * (1.0 - ROUNDING))
                limits[k] = max(1, filling + self.ahead)
            there_and_back += problem.durations[n + k]
            there_and_back += 2 * problem.transfers[k - 1] if k else 0.0
        return limits

    def varied(self, random: Random) -> Policy:
        """A policy that differs from this one in a few numbers."""
        policy = self
        for _ in range(random.choice((1, 1, 2, 3))):
            name = random.choice(_VARIED)
            if name == "swing":
                policy = replace(policy, swing=random.choice((0.0, 1.0, 2.0)))
            elif name == "ahead":
                ahead = random.choice((None, -2, -1, 0, 1, 2))
                policy = replace(policy, ahead=ahead)
            elif name == "patience":
                shift = random.gauss(0.0, 0.2)
                f, b, w = (min(1.0, max(0.0, share + shift)) for share in policy.patience)
                policy = replace(policy, patience=(f, b, w))
            elif name == "action":
                policy = replace(policy, action=_shifted(policy.action, random, _COARSE))
            elif name == "chunk":
                policy = replace(policy, chunk=_shifted(policy.chunk, random, _COARSE))
            elif name == "place":
                policy = replace(policy, place=_shifted(policy.place, random, _COARSE))
            else:
                policy = replace(policy, turn=_shifted(policy.turn, random, (0.03, 0.2)))
        return policy


_COARSE = (0.1, 0.5, 2.0)


def _shifted(values: Triple, random: Random, scales: Sequence[float]) -> Triple:
    """The three numbers, with one of them changed at random."""
    changed = list(values)
    changed[random.randrange(3)] += random.gauss(0.0, random.choice(scales))
    f, b, w = changed
    return f, b, w


def drawn(random: Random) -> Policy:
    """A random policy that fills memory with forwards before anything else.

    The choice of the next B then decides how fast memory fills again. Good choices depend so much
    on the chunks that only chance finds them.
    """
    draw = random.uniform
    return Policy(
        action=(draw(1.0, 6.0), 0.0, -1.0),
        chunk=(draw(0.0, 2.0), draw(-3.0, 0.0), draw(-1.0, 1.0)),
        turn=(draw(0.0, 0.1), 0.0, draw(0.0, 0.2)),
        patience=(draw(0.0, 1.0), 0.0, draw(0.0, 1.0)),
    )


_VARIED = ("action", "chunk", "place", "turn", "patience", "patience", "swing", "ahead")

_BACKWARDS_FIRST: Triple = (0.0, 1.0, -1.0)
"""B comes before F, and F before W, as in all known schedules."""


def _tails(share: float) -> Policy:
    return Policy(tails=True, patience=(share, share, share))


def _backwards(care: float, patience: float, alternates: bool, ahead: int | None = None) -> Policy:
    """A policy with B first; F waits for B, and W for both. With `alternates`, F follows each B."""
    swing = 2.0 if alternates else 0.0
    return Policy(False, _BACKWARDS_FIRST, patience=(care, 0.0, patience), swing=swing, ahead=ahead)


SEEDS: tuple[Policy, ...] = (
    _tails(0.3),
    _backwards(0.5, 0.5, True),
    _backwards(0.0, 0.5, True, -1),
    _backwards(0.0, 0.0, True),
    _tails(0.5),
    _tails(0.2),
    _backwards(0.5, 0.0, True, -1),
    _backwards(0.0, 0.5, False, -1),
    _tails(0.1),
    _backwards(0.0, 0.0, True, -1),
    _backwards(0.0, 1.0, True, -1),
    _backwards(0.5, 0.5, True, -1),
    _backwards(0.5, 1.0, True),
    _backwards(0.0, 0.5, False),
    _backwards(0.0, 0.0, False, -1),
    _backwards(0.0, 0.5, True),
)
"""The policies that a search begins with: each was the best for some pipeline, best first."""

BACKWARDS_FIRST: tuple[Policy, ...] = tuple(
    _backwards(care, patience, alternates, ahead)
    for patience, care, alternates, ahead in product(
        (0.0, 0.5, 1.0), (0.0, 0.5), (False, True), (None, -1, 0)
    )
)
"""The heuristic of Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, for any times,
memory and parts, with all of its options."""
