"""Copies what is large with more than one core: one alone does not use up the memory's bandwidth.

A copy is cut into shares, and the number of a core says with which one a thread on it begins. So
a rank that passes on what it has received copies each share on the core that wrote it, as long as
ranks use the same cores: data that lies in the cache of a core far away is copied five to ten times
slower. Whoever is done with a share takes what is left of others, from their ends. So nobody waits
for a helper that gets no core, but for the part that one is at.

Parts are large, for each one makes the threads wait for the interpreter's lock twice; numpy lets
go of it while it copies.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from queue import SimpleQueue
from threading import Thread
from typing import Final

import numpy as np

LEAST: Final = 4 << 20
"""Bytes below which a copy is over before a helper has woken up."""

PART: Final = 8 << 20
"""Bytes of the largest part."""

MOST_HELPERS: Final = 3
"""More would copy no faster: a few cores use up the bandwidth of a memory controller."""

current_core: Callable[[], int] = ctypes.PyDLL(None).sched_getcpu
"""The core that the calling thread runs on."""


class Copier:
    """Copies memory. The helping threads start with the first large copy, and end with the process.

    Args:
        helpers: threads besides the one that asks; by default as many as this process has cores
            for, up to `MOST_HELPERS`.
    """

    def __init__(self, helpers: int | None = None) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self._helpers = min(len(cores) - 1, MOST_HELPERS) if helpers is None else helpers
        self._shares = self._helpers + 1
        self._share_of = {core: index % self._shares for index, core in enumerate(cores)}
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._threads: list[int] = []
        self._avoided: int | None = None

    def copy(self, target: memoryview, source: memoryview) -> None:
        """Copy `source` to `target`: contiguous bytes, as many of the one as of the other."""
        if source.nbytes < LEAST or not self._helpers:
            target[:] = source
            return
        core = current_core()
        if core != self._avoided:
            self._avoid(core)
        job = Job(target, source, self._shares)
        try:
            job.work(self._share(core), self._call)
        finally:
            job.stop()  # what is copied to may be used for something else from here on

    def _call(self, job: Job) -> None:
        for _ in range(self._helpers):
            self._jobs.put(job)

    def _start(self) -> int:
        thread = Thread(target=self._help, name="cg copier", daemon=True)
        thread.start()
        assert thread.native_id is not None
        return thread.native_id

    def _avoid(self, core: int) -> None:
        """Keep the helpers away from the core of the thread that asks.

        The kernel likes to wake a thread where the one runs that wakes it, though other cores idle.
        """
        if not self._threads:
            self._threads = [self._start() for _ in range(self._helpers)]
        self._avoided = core
        others = os.sched_getaffinity(0) - {core}
        if not others:
            return
        for thread in self._threads:
            with suppress(OSError):  # those cores have just been taken from us
                os.sched_setaffinity(thread, others)

    def _share(self, core: int) -> int:
        return self._share_of.get(core, 0)

    def _help(self) -> None:
        while True:
            self._jobs.get().help(self._share(current_core()))


class Job:
    """One copy, of `source` to `target`: contiguous bytes, as many of the one as of the other.

    Args:
        shares: how many threads may begin at different places.
    """

    def __init__(self, target: memoryview, source: memoryview, shares: int) -> None:
        self._target = np.frombuffer(target, dtype=np.uint8)
        self._source = np.frombuffer(source, dtype=np.uint8)
        self._shares = [deque(parts) for parts in cut(source.nbytes, shares)]
        self._asked: deque[None] = deque()  # as often as a helper has asked for a part
        self._ended: deque[None] = deque()  # as often as one is done with what it got
        self._news: SimpleQueue[None] = SimpleQueue()  # after each of these

    def work(self, share: int, call: Callable[[Job], None]) -> None:
        """Copy parts until none is left: first those of a share, in their order.

        Args:
            call: wakes the helpers.
        """
        mine, asked, ended, wait = self._shares[share], self._asked, self._ended, self._news.get
        part = mine.popleft()
        target, source = self._target[part], self._source[part]
        # A helper that wakes up, or has copied its part, needs the interpreter's lock. One that has
        # to wait for it gets it late where a rank polls on its core: up to 0.3 ms. So this thread
        # holds the lock for next to no time before its part and, where that is the last of its
        # share, behind it.
        call(self)
        np.copyto(target, source)
        if not mine:
            while len(ended) < len(asked):
                wait()
        for take in self._ways(share):
            with suppress(IndexError):  # a look before would say nothing: others take parts as well
                while True:
                    self._copy(take())

    def help(self, share: int) -> None:
        """The same, in a thread that was called, and that nothing interrupts."""
        for take in self._ways(share):
            with suppress(IndexError):
                while True:
                    self._asked.append(None)
                    try:
                        self._copy(take())
                    finally:
                        self._ended.append(None)
                        self._news.put(None)

    def stop(self) -> None:
        """Let nobody begin another part, and wait for the helpers to end those that they are at."""
        for parts in self._shares:
            parts.clear()
        while len(self._ended) < len(self._asked):  # who asks from here on gets nothing
            self._news.get()

    def _ways(self, share: int) -> Iterator[Callable[[], slice]]:
        """What gives one part after the other of a share, and then of each share."""
        yield self._shares[share].popleft
        for parts in self._shares:
            yield parts.pop

    def _copy(self, part: slice) -> None:
        np.copyto(self._target[part], self._source[part])


@lru_cache(maxsize=64)
def cut(nbytes: int, shares: int) -> tuple[tuple[slice, ...], ...]:
    """The parts of each share of so many bytes, in their order."""
    length = -(-nbytes // shares)
    bounds = [min(share * length, nbytes) for share in range(shares + 1)]
    return tuple(
        tuple(slice(at, min(at + PART, end)) for at in range(begin, end, PART))
        for begin, end in pairwise(bounds)
    )
