"""Wait for other ranks without burning a core, and tell them where this rank waits.

A blocking MPI call burns a core, cannot be interrupted by Ctrl-C, and says nothing when the other
side never comes. So all waiting here is a loop over a test, with a deadline.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...backends.cpu.waiting.contention import Contention

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Request

POLLS = 32
YIELDS = 20
FIRST_PAUSE = 50e-6
LONGEST_PAUSE = 2e-3
GLANCE_EVERY = 0.05
"""Seconds between two looks at what other ranks say, while waiting."""

NOTICE_TAG = 1


class WorldError(RuntimeError):
    """The ranks that run together do not agree on what they are doing, or cannot start."""

    __module__ = "cg"  # the public name, which tracebacks show


@dataclass(frozen=True)
class Notice:
    """The call in which a rank has waited for a while, as it tells the others."""

    sequence: int
    """The number of collective calls that the rank has made, this one included."""
    call: str
    """The call in which it waits; empty: its program has ended."""
    where: str
    """The user's line, as `file:line`."""

    @property
    def left(self) -> bool:
        """True if the rank's program has ended."""
        return not self.call


class Notices:
    """Sends notices to all other ranks, and reads theirs on demand.

    Args:
        mpi: the module `mpi4py.MPI`.
        comm: a communicator that nothing else receives on.
    """

    def __init__(self, mpi: Any, comm: Comm) -> None:
        self._mpi = mpi
        self._comm = comm
        self._sending: list[Request] = []
        self.latest: dict[int, Notice] = {}
        """The last notice of each rank that has sent one."""

    def post(self, notice: Notice) -> None:
        """Tell every other rank."""
        self._sending = [request for request in self._sending if not request.Test()]
        for peer in range(self._comm.size):
            if peer != self._comm.rank:
                self._sending.append(self._comm.isend(notice, peer, NOTICE_TAG))

    def collect(self) -> None:
        """Read what has arrived."""
        status = self._mpi.Status()
        while message := self._comm.improbe(self._mpi.ANY_SOURCE, NOTICE_TAG, status):
            self.latest[status.source] = message.recv()


def wait_until(
    done: Callable[[], bool], seconds: float | None, glance: Callable[[float], None]
) -> bool:
    """Poll `done`: at once, then yielding the core, then asleep most of the time.

    Args:
        done: true when the wait is over; also makes progress.
        seconds: how long to wait at most; None: for ever.
        glance: called with the seconds waited so far, some times a second. May raise.

    Returns:
        True if it was over in time.
    """
    contention = Contention()
    for turn in range(POLLS + YIELDS):
        if done():
            return True
        if turn >= POLLS:
            began = time.perf_counter()
            os.sched_yield()
            if contention.note(began, time.perf_counter()):
                break
    start = time.monotonic()
    pause, next_glance = FIRST_PAUSE, GLANCE_EVERY
    while not done():
        waited = time.monotonic() - start
        if seconds is not None and waited >= seconds:
            return False
        if waited >= next_glance:
            glance(waited)
            next_glance = waited + GLANCE_EVERY
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return True


@contextmanager
def ending_after(seconds: float | None) -> Iterator[None]:
    """End this process, and say where it is, if the `with` block takes longer.

    It is for calls of MPI that block and keep the interpreter's lock: only a thread that needs no
    lock can end them.
    """
    if seconds is not None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def user_line() -> str:
    """The innermost line of the call stack outside this package, as `file:line`."""
    package = __name__.partition(".")[0]
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module != package and not module.startswith(package + "."):
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
