"""How a rank waits: a few polls, some yields of the core, then sleep until somebody rings.

Polling answers fastest while the other side runs on another core. Yielding lets it run where both
share one, which the kernel likes to do to partners that wake each other; it is counted, not
timed, because a yield that finds nobody else to run costs next to nothing. Sleeping costs no CPU,
and under contention it is the fastest.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from ..node import Node
from .contention import Contention


@dataclass(frozen=True, slots=True)
class WaitPolicy:
    """How long each stage of a wait is.

    Attributes:
        polls: polls without a pause.
        yields: polls with a yield of the core before each.
        sleep: seconds of one sleep; then the rank looks again, in case a ring was lost.
        nap: seconds of the first sleep where other machines take part, for nothing rings for
            them; the next naps are twice as long each.
        longest_nap: and no longer than this.
    """

    polls: int = 16
    yields: int = 20
    sleep: float = 0.1
    nap: float = 50e-6
    longest_nap: float = 5e-3

    @staticmethod
    def suiting(node: Node) -> WaitPolicy:
        """The policy for a machine: more yields where every rank has a core to itself."""
        return WaitPolicy(yields=200 if node.cores >= len(node.local) else 20)


class Waiter:
    """The pause of this process's waits (`Pause` in `backends/base.py`).

    Args:
        node: this machine.
        policy: how long each stage is.
        check: called before each sleep and after it; what it raises ends the wait.
    """

    def __init__(self, node: Node, policy: WaitPolicy, check: Callable[[], None]) -> None:
        self._node = node
        self._policy = policy
        self._check = check
        self._yield_after = policy.polls
        self._sleep_after = policy.polls + policy.yields
        self._spans = len(node.leaders) > 1
        self._flag = node.waiting(node.rank)
        self._armed = False
        self._contention = Contention()

    def __call__(self, polls: int, /) -> None:
        """See `Pause`."""
        if polls <= self._yield_after:
            if self._armed:
                self._disarm()
        elif polls <= self._sleep_after and not self._contention.is_on(began := perf_counter()):
            os.sched_yield()
            self._contention.note(began, perf_counter())
        elif self._armed:
            self._sleep(polls)
        else:
            self._arm()

    def _arm(self) -> None:
        """Ask to be woken; the caller polls once more, for what came before it could be seen."""
        self._check()
        self._node.words[self._flag] = 1
        self._node.fence()
        self._armed = True

    def _disarm(self) -> None:
        self._node.words[self._flag] = 0
        self._armed = False

    def _sleep(self, polls: int) -> None:
        try:
            self._node.bell.wait(self._seconds(polls))
        finally:
            self._disarm()
        self._check()

    def _seconds(self, polls: int) -> float:
        policy = self._policy
        if not self._spans:
            return policy.sleep
        slept = max(polls - self._sleep_after, 0) // 2
        return float(min(policy.nap * 2 ** min(slept, 30), policy.longest_nap))
