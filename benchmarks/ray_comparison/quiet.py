"""Tells when the machine is itself: a rented one changes under a benchmark, by half and more.

Three things make most of it. The cores that a hypervisor gives out may share a cache in one second
and none in the next, which a message from core to core takes several times as long for. A core may
be half of one whose other half is somebody else's. And caches and memory have other users, too. All
of it shows in short measurements, taken on each core in turn: how long a loop takes, how long it
takes to read what the core before has written, and to copy what does not fit into a core's cache. A
machine is quiet while all three are close to the best that was seen in some seconds.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass

import numpy as np

_STEPS = 3000
"""Of the loop; some 80 µs."""

_BYTES = 1 << 19
"""Bytes that one core writes and the next one reads; more would not stay in its own cache."""

_LARGE = 1 << 23
"""Bytes that are copied; some 0.3 ms."""

_ROUNDS = 4
"""Over all cores. The best of them counts, for what was measured may still be ending."""

_SLOWER = 1.3
_FARTHER = 2.0
_FULLER = 1.5
"""By how much the three may be longer than the best. Cores without a common cache take 4 times as
long and more to read what the other has written."""

current_core: Callable[[], int] = ctypes.PyDLL(None).sched_getcpu


@dataclass(frozen=True)
class Pace:
    """How fast the machine is.

    Attributes:
        loop_us: what the loop takes on the slowest core.
        fetch_us: what it takes to read what another core has written, where that is slowest.
        copy_us: what it takes to copy much, on the slowest core.
    """

    loop_us: float
    fetch_us: float
    copy_us: float

    def is_close_to(self, best: Pace) -> bool:
        """True if the machine is about as quick as at its best."""
        return (
            self.loop_us < _SLOWER * best.loop_us
            and self.fetch_us < _FARTHER * best.fetch_us
            and self.copy_us < _FULLER * best.copy_us
        )


class Probe:
    """Measures the pace of the cores that the calling thread may use, in some milliseconds."""

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        # Of ones: pages that nobody has written to are all the same one.
        self._passed, self._taken = (np.ones(_BYTES, dtype=np.uint8) for _ in range(2))
        self._large, self._copy = (np.ones(_LARGE, dtype=np.uint8) for _ in range(2))

    def pace(self) -> Pace:
        """The pace now. The thread is back on its core when this returns."""
        home = current_core()
        try:
            found = [self._look(core) for _ in range(_ROUNDS) for core in self._cores]
        finally:
            os.sched_setaffinity(0, {home})
            os.sched_setaffinity(0, self._cores)
        by_core = [found[index :: len(self._cores)] for index in range(len(self._cores))]
        return Pace(*map(max, zip(*map(_best, by_core), strict=True)))

    def best(self, seconds: float) -> Pace:
        """The best pace that is seen in so many seconds."""
        until = time.monotonic() + seconds
        seen = [self.pace()]
        while time.monotonic() < until:
            seen.append(self.pace())
            time.sleep(0.01)
        return Pace(*_best([astuple(pace) for pace in seen]))

    def _look(self, core: int) -> tuple[float, float, float]:
        os.sched_setaffinity(0, {core})
        fetch = _took(lambda: np.copyto(self._taken, self._passed))
        self._passed += 1
        loop = _took(_loop)
        return loop, fetch, _took(lambda: np.copyto(self._copy, self._large))


def _best(paces: list[tuple[float, ...]]) -> list[float]:
    return [min(figures) for figures in zip(*paces, strict=True)]


def _took(what: Callable[[], object]) -> float:
    """Microseconds."""
    began = time.perf_counter_ns()
    what()
    return (time.perf_counter_ns() - began) / 1e3


def _loop() -> None:
    total = 0
    for step in range(_STEPS):
        total += step
