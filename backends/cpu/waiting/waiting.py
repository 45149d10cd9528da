"""Wait in a rank: a few polls, some yields of the core, then sleep until somebody rings.

Polling answers fastest while the other side runs on another core. Yielding lets the other side run
where both share a core, as the kernel likes to place processes that wake each other. Yields are
counted, not timed, because a yield that finds nobody else to run costs next to nothing. Sleeping
costs no CPU time, and under contention it is the fastest.
"""

from __future__ import annotations

from collections.abc import Callable
from os import sched_yield
from time import perf_counter
from typing import Final

from .contention import LONG, Contention
from .node import MachineNode

_POLLS: Final = 16
"""Polls without a pause."""

_YIELDS: Final = 20
_YIELDS_WITH_CORES: Final = 200
"""Polls with a yield of the core before each; more where every rank has a core to itself."""

SLEEP: Final = 0.1
"""Seconds of one sleep; then the process looks again, in case a ring was lost."""

_NAP: Final = 50e-6
_LONGEST_NAP: Final = 5e-3


def nap(naps: int) -> float:
    """Seconds of a sleep after `naps` others, where no bell rings for all that is waited for."""
    return float(min(_NAP * 2 ** min(naps, 30), _LONGEST_NAP))


class Waiter:
    """The pause of this process's waits (`Pause` in `backends/base.py`).

    Args:
        node: this machine.
        check: called before each sleep and after it; what it raises ends the wait.
        sleep: seconds of one sleep.
    """

    def __init__(self, node: MachineNode, check: Callable[[], None], sleep: float = SLEEP) -> None:
        self._node = node
        self._check = check
        self._sleep_seconds = sleep
        has_cores = node.cores >= len(node.local)
        self._sleep_after = _POLLS + (_YIELDS_WITH_CORES if has_cores else _YIELDS)
        self._flag = node.waiting(node.rank)
        self._armed = False
        self._contention = Contention()

    def __call__(self, polls: int, /) -> None:
        """Give way after `polls` fruitless polls."""
        if polls <= _POLLS:
            if self._armed:
                self._disarm()
        elif polls <= self._sleep_after and self._contention.until < (began := perf_counter()):
            sched_yield()
            if (ended := perf_counter()) - began > LONG:  # rare, and a call takes time
                self._contention.note(began, ended)
        elif self._armed:
            self._sleep(polls)
        else:
            self._arm()

    def _arm(self) -> None:
        """Ask to be woken; the caller polls once more, as others may not have seen the request."""
        self._check()
        self._node.words[self._flag] = 1
        self._node.fence()
        self._armed = True

    def _disarm(self) -> None:
        self._node.words[self._flag] = 0
        self._armed = False

    def _sleep(self, polls: int) -> None:
        naps = max(polls - self._sleep_after, 0) // 2
        try:
            self._node.bell.wait(self._sleep_seconds if self._node.is_rung else nap(naps))
        finally:
            self._disarm()
        self._check()
