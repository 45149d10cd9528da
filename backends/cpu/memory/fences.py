"""Memory fences: what orders a payload before its flag, and a flag before a sleep.

An aligned 8-byte store through a memoryview is one plain store. x86-64 keeps plain stores in order
and plain loads in order, so there a payload needs no fence before its flag; aarch64 needs one on
both sides. Deciding to sleep (store "I wait", load the flag) against publishing (store the flag,
load "it waits") needs a full fence on both sides everywhere.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Callable
from typing import Any

from ...errors import TransportError
from ..mpi import module_of
from .native import native

Fence = Callable[[], object]

_X86_64 = ("x86_64", "AMD64")
_SEQ_CST = 5  # memory_order_seq_cst of C11
_MEMBARRIER_NUMBERS = {"x86_64": 324, "aarch64": 283}
_MEMBARRIER_GLOBAL_EXPEDITED = 1 << 1
_MEMBARRIER_REGISTER_GLOBAL_EXPEDITED = 1 << 2


def full_fence(comm: Any = None) -> tuple[Fence, Callable[[], None]]:
    """A callable that is a sequentially consistent fence, and the one that gives it back.

    In a compiled wheel it is C's. Else, on x86-64, taking a free lock is one (it executes an
    instruction with the lock prefix); elsewhere it is libatomic's, or `MPI_Win_sync`, or the
    kernel's membarrier.

    Args:
        comm: an mpi4py communicator, or None where there is no MPI.

    Raises:
        TransportError: nothing of that is there.
    """
    if native is not None:
        return native.fence, _nothing
    if platform.machine() in _X86_64:
        return _lock_fence(), _nothing
    fence = libatomic_fence()
    if fence is None and comm is not None:
        return window_fence(comm)
    fence = fence or membarrier_fence()
    if fence is None:
        raise TransportError(
            "no full memory fence found: install libatomic (libatomic1 in Debian), or run under MPI"
        )
    return fence, _nothing


def publish_fence(full: Fence) -> Fence | None:
    """The fence between payload and flag; None where plain stores and loads keep their order."""
    return None if platform.machine() in _X86_64 else full


def libatomic_fence() -> Fence | None:
    """C11's fence from the compiler's run-time library, if that is installed."""
    try:
        fence = ctypes.CDLL("libatomic.so.1").atomic_thread_fence
    except (OSError, AttributeError):
        return None
    fence.argtypes = (ctypes.c_int,)
    fence.restype = None
    return lambda: fence(_SEQ_CST)


def window_fence(comm: Any) -> tuple[Fence, Callable[[], None]]:
    """MPI's: `MPI_Win_sync` is a full fence in MPICH and Open MPI, inside an epoch."""
    mpi = module_of(comm)
    window = mpi.Win.Create(None, comm=mpi.COMM_SELF)
    window.Lock_all()

    def give_back() -> None:
        window.Unlock_all()
        window.Free()

    return window.Sync, give_back


def membarrier_fence() -> Fence | None:
    """The kernel's barrier over all registered processes: slow, but it needs only Linux."""
    number = _MEMBARRIER_NUMBERS.get(platform.machine())
    if number is None:
        return None
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_uint, ctypes.c_int)
    syscall.restype = ctypes.c_long
    if syscall(number, _MEMBARRIER_REGISTER_GLOBAL_EXPEDITED, 0, 0) != 0:
        return None
    return lambda: syscall(number, _MEMBARRIER_GLOBAL_EXPEDITED, 0, 0)


def _lock_fence() -> Fence:
    lock = threading.Lock()
    acquire, release = lock.acquire, lock.release

    def fence() -> None:
        try:
            acquire()
        finally:  # also where a signal's handler raises in between
            release()

    return fence


def _nothing() -> None:
    """Nothing to give back."""
