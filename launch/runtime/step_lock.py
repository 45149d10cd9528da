"""A lock that lets one thread of a process at a time trace, compile or run the steps of a world.

A trace puts stand-ins in place of what actors hold until it has ended, and a bound program has one
set of registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock, RLock

from ...backends.base import World
from ...backends.errors import StepTimeout
from ...backends.per_world import PerWorld
from ..environment.config import config


class StepLock:
    """The lock of a world's steps, among the threads of this process.

    Attributes:
        acquire, release: as those of an `RLock`.
        is_tracing: True while a thread traces a step.
    """

    def __init__(self, alone: bool) -> None:
        self._alone = alone
        lock = RLock()
        self.acquire = lock.acquire
        self.release = lock.release
        self.is_tracing = False

    def wait(self, step: str) -> None:
        """Acquire the lock, which another thread holds.

        Raises:
            RuntimeError: there are other processes, whose threads may come in another order.
            StepTimeout: the other thread has gone on until the deadline (CG_TIMEOUT).
        """
        if not self._alone:
            raise RuntimeError(
                f"step '{step}' is used while another thread of this process traces, compiles or "
                "runs a step. All ranks must come to their steps in one order, which threads do "
                "not keep: use steps in one thread of each rank"
            )
        timeout = config().timeout
        if not self.acquire(timeout=-1 if timeout is None else timeout):
            raise StepTimeout(
                f"step '{step}' has waited {timeout:g} s for another thread of this process, which "
                "traces, compiles or runs a step"
            )

    @contextmanager
    def held(self, step: str, tracing: bool = False) -> Iterator[None]:
        """Hold the lock inside of the `with` block; raises as `wait` does."""
        if not self.acquire(blocking=False):
            self.wait(step)
        before, self.is_tracing = self.is_tracing, self.is_tracing or tracing
        try:
            yield
        finally:
            self.is_tracing = before
            self.release()


_locks: PerWorld[StepLock] = PerWorld()
_making = Lock()


def lock_of(world: World) -> StepLock:
    """The lock of the steps of a world."""
    with _making:
        return _locks.of(world, partial(StepLock, alone=world.is_virtual))
