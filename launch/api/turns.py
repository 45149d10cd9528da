"""Turns: one thread of a process at a time traces, compiles or runs the steps of a world.

A trace puts stand-ins in place of what actors hold until it has ended, and a bound program has one
set of registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, RLock
from weakref import WeakKeyDictionary

from ...backends.base import World
from ...backends.errors import StepTimeout
from ..config import config


class Turn:
    """Whose turn it is among the threads of this process.

    Attributes:
        acquire, release: as those of an `RLock`.
        is_tracing: whether a thread traces a step.
    """

    def __init__(self, alone: bool) -> None:
        self._alone = alone
        lock = RLock()
        self.acquire = lock.acquire
        self.release = lock.release
        self.is_tracing = False

    def wait(self, step: str) -> None:
        """Acquire, where another thread has the turn.

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
    def taken(self, step: str, tracing: bool = False) -> Iterator[None]:
        """Have the turn inside of the `with` block; otherwise as `wait`."""
        if not self.acquire(blocking=False):
            self.wait(step)
        before, self.is_tracing = self.is_tracing, self.is_tracing or tracing
        try:
            yield
        finally:
            self.is_tracing = before
            self.release()


_turns: WeakKeyDictionary[World, Turn] = WeakKeyDictionary()
_making = Lock()


def turn_of(world: World) -> Turn:
    """The turn of the steps of a world."""
    with _making:
        return _turns.setdefault(world, Turn(alone=world.is_virtual))
