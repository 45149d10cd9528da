"""Policies: what makes a task urgent, in a few numbers that a search can vary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random

from .bound import Windows
from .list_scheduling import Rule
from .problem import ROUNDING, Problem

Triple = tuple[float, float, float]
"""A number each for F, B and W."""

_NONE: Triple = (0.0, 0.0, 0.0)
_TIE = 1e-6
"""What a later part's tasks are more urgent by, so that they come first among equals."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What makes a task urgent. The unit is the work of a microbatch on the busiest rank.

    Attributes:
        tails: whether a task's tail counts, the time that must pass from its end to that of all.
        action: what counts for each F, B and W.
        chunk: the same again for each earlier part of the same rank.
        place: the same again for each earlier rank, over the number of ranks.
        turn: the same, negative, for each earlier microbatch.
        patience: as in `Rule`.
        swing: as in `Rule`.
        ahead: how many more forwards than it takes to fill the time until its first B a part may
            be ahead; None for as many as memory allows.
    """

    tails: bool = False
    action: Triple = _NONE
    chunk: Triple = _NONE
    place: Triple = _NONE
    turn: Triple = _NONE
    patience: Triple = _NONE
    swing: float = 0.0
    ahead: int | None = None

    def urgency(self, problem: Problem, windows: Windows) -> list[list[float]]:
        """By lane and microbatch."""
        n, m = problem.parts, problem.microbatches
        unit = max(problem.work(rank) for rank in range(problem.ranks)) or 1.0
        found = []
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
                    found.append([base + slope * i + tail for i, tail in enumerate(tails)])
                elif slope:
                    found.append([base + slope * i for i in range(m)])
                else:
                    found.append([base] * m)
        return found

    def rule(self, problem: Problem, urgency: Sequence[Sequence[float]]) -> Rule:
        """This policy with an urgency that may have been adjusted."""
        unit = max(problem.work(rank) for rank in range(problem.ranks)) or 1.0
        return Rule(urgency, self.patience, self.swing * unit, self._limits(problem))

    def _limits(self, problem: Problem) -> Sequence[float]:
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
                values = [min(1.0, max(0.0, value + shift)) for value in policy.patience]
                policy = replace(policy, patience=tuple(values))
            else:
                values = list(getattr_triple(policy, name))
                scale = random.choice((0.03, 0.2) if name == "turn" else (0.1, 0.5, 2.0))
                values[random.randrange(3)] += random.gauss(0.0, scale)
                policy = replace(policy, **{name: tuple(values)})
        return policy


def getattr_triple(policy: Policy, name: str) -> Triple:
    return {
        "action": policy.action,
        "chunk": policy.chunk,
        "place": policy.place,
        "turn": policy.turn,
    }[name]


_VARIED = ("action", "chunk", "place", "turn", "patience", "patience", "swing", "ahead")

_BACKWARDS_FIRST: Triple = (0.0, 1.0, -1.0)
"""B before F before W, as all known schedules have it."""

SEEDS: tuple[Policy, ...] = (
    *(Policy(tails=True, patience=(share,) * 3) for share in (0.3, 0.1, 0.5, 0.0, 0.2, 0.7)),
    *(
        Policy(False, _BACKWARDS_FIRST, patience=(care, 0.0, patience), swing=swing, ahead=ahead)
        for patience, care, swing, ahead in product(
            (0.0, 0.5, 1.0), (0.0, 0.5), (0.0, 2.0), (None, -1, 0)
        )
    ),
)
"""What a search begins with."""
