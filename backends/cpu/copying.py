"""Copies what is large with more than one core: one alone does not use up the memory's bandwidth.

A copy is cut into parts. Whoever is free takes the next one: helping threads, and the thread that
has asked for the copy. So it never waits for a helper that gets no core, but for the part that one
is at. numpy lets other Python threads run while it copies.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from queue import SimpleQueue
from threading import Lock, Semaphore, Thread

import numpy as np

LEAST = 4 << 20
"""Bytes below which a copy is over before a helper has woken up."""

PART = 1 << 20
"""Bytes of one part."""

MOST_HELPERS = 3
"""More would copy no faster: a few cores use up the bandwidth of a memory controller."""


class Copier:
    """Copies memory. The helping threads start with the first large copy, and end with the process.

    Args:
        helpers: threads besides the one that asks; by default as many as this process has cores
            for, up to `MOST_HELPERS`.
    """

    def __init__(self, helpers: int | None = None) -> None:
        free = len(os.sched_getaffinity(0)) - 1
        self._helpers = min(free, MOST_HELPERS) if helpers is None else helpers
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._started = False

    def copy(self, target: memoryview, source: memoryview) -> None:
        """Copy `source` to `target`: contiguous bytes, as many of the one as of the other."""
        if source.nbytes < LEAST or not self._helpers:
            target[:] = source
            return
        job = Job(target, source)
        self.hand_out(job)
        try:
            job.work()
            job.wait()
        except BaseException:
            job.stop()  # what is copied to may be used for something else before long
            raise

    def hand_out(self, job: Job) -> None:
        """Let the helping threads take part in a copy, as soon as they get a core."""
        if not self._started:
            self._start()
        for _ in range(self._helpers):
            self._jobs.put(job)

    def _start(self) -> None:
        self._started = True
        for _ in range(self._helpers):
            Thread(target=self._help, name="cg copier", daemon=True).start()

    def _help(self) -> None:
        while True:
            self._jobs.get().work()


class Job:
    """One copy, of `source` to `target`: contiguous bytes, as many of the one as of the other."""

    def __init__(self, target: memoryview, source: memoryview) -> None:
        self._target = np.frombuffer(target, dtype=np.uint8)
        self._source = np.frombuffer(source, dtype=np.uint8)
        self._parts: Iterator[int] = iter(range(0, source.nbytes, PART))
        self._count = -(-source.nbytes // PART)
        self._lock = Lock()
        self._done = Semaphore(0)

    def work(self) -> None:
        """Copy parts until none is left."""
        while True:
            with self._lock:
                at = next(self._parts, None)
            if at is None:
                return
            np.copyto(self._target[at : at + PART], self._source[at : at + PART])
            self._done.release()

    def stop(self) -> None:
        """Let nobody begin another part."""
        with self._lock:
            self._parts = iter(())

    def wait(self) -> None:
        """Return when all parts are copied."""
        for _ in range(self._count):
            self._done.acquire()
