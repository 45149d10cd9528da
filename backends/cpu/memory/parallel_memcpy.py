"""Copy large memory with several cores: one alone does not use up the memory's bandwidth.

A copy is cut into shares, and a thread's core decides with which share the thread begins. So a rank
that passes on what it has received copies each share on the core that wrote it, as long as ranks
use the same cores. Data in the cache of a distant core is copied five to ten times slower. A thread
that is done with its share takes parts from the ends of the others. So nobody waits for a helper
that gets no core, only for the parts that helpers have begun.

Parts are large, because each one makes its thread wait for the interpreter's lock twice; numpy
releases the lock while it copies.
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
from threading import Lock, Thread
from typing import Any, Final

import numpy as np

from ...errors import TransportError

LEAST: Final = 4 << 20
"""Bytes below which a copy is over before a helper has woken up."""

PART: Final = 8 << 20
"""Bytes of the largest part."""

MOST_HELPERS: Final = 3
"""More would copy no faster: a few cores use up the bandwidth of a memory controller."""

current_core: Callable[[], int] = ctypes.PyDLL(None).sched_getcpu
"""The core that the calling thread runs on."""

_NOTHING: Final = np.empty(0, dtype=np.uint8)


class Copier:
    """Copies memory. The helping threads start with the first large copy, and end with the process.

    Args:
        helpers: threads besides the caller's; by default as many as this process has cores for, up
            to `MOST_HELPERS`.

    Attributes:
        threads: the helpers that have been started, by the system's thread ids.
    """

    def __init__(self, helpers: int | None = None) -> None:
        self._cores = os.sched_getaffinity(0)
        self._helpers = min(len(self._cores) - 1, MOST_HELPERS) if helpers is None else helpers
        self._shares = self._helpers + 1
        places = enumerate(sorted(self._cores))
        self._share_of = {core: index % self._shares for index, core in places}
        self._jobs: SimpleQueue[CopyJob] = SimpleQueue()
        self.threads: list[int] = []
        self._starting = Lock()
        self._is_started = False
        self._avoided: int | None = None

    def copy(self, target: memoryview, source: memoryview) -> None:
        """Copy `source` to `target`; both are contiguous bytes of the same length.

        Raises:
            TransportError: a part was not copied, because a helper has failed.
        """
        if source.nbytes < LEAST or not self._helpers:
            target[:] = source
            return
        if not self._is_started:
            self._start()
        core = current_core()
        if core != self._avoided:
            self._avoid(core)
        job = CopyJob(target, source, self._shares)
        try:
            job.work(self.share(core), self._call)
        finally:
            job.stop()  # from here on the target may be used for something else
        job.check()

    def _call(self, job: CopyJob) -> None:
        for _ in self.threads:
            self._jobs.put(job)

    def _start(self) -> None:
        """Start the helpers, or as many of them as the system lets us."""
        with self._starting:
            if self._is_started:
                return
            self._is_started = True
            for _ in range(self._helpers):
                thread = Thread(target=self._help, name="cg copier", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # there are too many
                    return
                assert thread.native_id is not None
                self.threads.append(thread.native_id)

    def _avoid(self, core: int) -> None:
        """Keep the helpers away from the caller's core.

        The kernel likes to wake a thread on the core of the thread that wakes it, even if others
        idle.
        """
        self._avoided = core
        others = self._cores - {core}
        if not others:
            return
        for thread in self.threads:
            with suppress(OSError):  # those cores have been taken from us
                os.sched_setaffinity(thread, others)

    def share(self, core: int) -> int:
        """The share with which a thread on a core begins; the first on a core added later."""
        return self._share_of.get(core, 0)

    def _help(self) -> None:
        while True:
            self._jobs.get().help(self.share(current_core()))


class CopyJob:
    """One copy of `source` to `target`; both are contiguous bytes of the same length.

    Args:
        shares: the number of shares, at which different threads may begin.
    """

    def __init__(self, target: memoryview, source: memoryview, shares: int) -> None:
        self._target: Any = np.frombuffer(target, dtype=np.uint8)
        self._source: Any = np.frombuffer(source, dtype=np.uint8)
        self._shares = [deque(parts) for parts in cut(source.nbytes, shares)]
        self._count = sum(map(len, self._shares))
        # Their lengths are counts: an append is one step, whatever signal or thread comes in
        # between.
        self._copied: deque[None] = deque()  # parts
        self._asked: deque[None] = deque()  # requests of helpers for a part
        self._ended: deque[None] = deque()  # requests whose part is done
        self._news: SimpleQueue[None] = SimpleQueue()  # an entry after each of these

    def work(self, share: int, call: Callable[[CopyJob], None]) -> None:
        """Copy parts until none is left: first those of a share, in their order.

        Args:
            share: the share to begin with.
            call: wakes the helpers.
        """
        asked, ended, wait = self._asked, self._ended, self._news.get
        part = self._shares[share].popleft()
        target, source = self._target[part], self._source[part]
        # A helper that wakes up, or has copied its part, needs the interpreter's lock. If it has to
        # wait for the lock, and a rank polls on its core, it gets the lock up to 0.3 ms late. So
        # this thread hardly holds the lock before its part and, if nothing is left, after it.
        call(self)
        np.copyto(target, source)
        if not any(self._shares):
            while len(ended) < len(asked):
                wait()
        self._copied.append(None)
        for part in self._parts(share):
            self._copy(part)

    def help(self, share: int) -> None:
        """Copy parts in a helping thread, which no signal interrupts."""
        parts = self._parts(share)
        more = True
        while more:
            self._asked.append(None)
            try:
                part = next(parts, None)
                more = part is not None
                if part is not None:
                    self._copy(part)
            finally:
                self._ended.append(None)
                self._news.put(None)

    def stop(self) -> None:
        """Let no thread begin another part, and wait until the helpers have ended theirs.

        An interruption of the wait is raised after it.
        """
        interruption: BaseException | None = None
        while True:
            try:
                for parts in self._shares:
                    parts.clear()
                while len(self._ended) < len(self._asked):  # later requests get nothing
                    self._news.get()
                break
            except BaseException as error:
                interruption = error
        self._target = self._source = _NOTHING  # a helper that comes late holds on to no memory
        if interruption is not None:
            raise interruption

    def check(self) -> None:
        """Check that all parts have been copied.

        Raises:
            TransportError: they have not.
        """
        if len(self._copied) < self._count:
            raise TransportError(
                f"a message was copied in {self._count} parts, and of some nothing came: a helping "
                "thread has failed (its traceback is above), or a signal's handler has raised "
                "IndexError"
            )

    def _parts(self, share: int) -> Iterator[slice]:
        """The parts left of a share, in order, then those left of all shares, from their ends."""
        for take in (self._shares[share].popleft, *(parts.pop for parts in self._shares)):
            while True:
                try:
                    part = take()
                except IndexError:  # a look ahead would not help: other threads take parts
                    break
                yield part

    def _copy(self, part: slice) -> None:
        np.copyto(self._target[part], self._source[part])
        self._copied.append(None)


@lru_cache(maxsize=64)
def cut(nbytes: int, shares: int) -> tuple[tuple[slice, ...], ...]:
    """Cut `nbytes` bytes into shares, and each share into parts, all in order."""
    length = -(-nbytes // shares)
    bounds = [min(share * length, nbytes) for share in range(shares + 1)]
    return tuple(
        tuple(slice(at, min(at + PART, end)) for at in range(begin, end, PART))
        for begin, end in pairwise(bounds)
    )
