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

from ...errors import TransportError
from .native import native

Fence = Callable[[], object]

_X86_64 = ("x86_64", "AMD64")
_SEQ_CST = 5  # memory_order_seq_cst of C11
_MEMBARRIER_NUMBERS = {"x86_64": 324, "aarch64": 283}
_MEMBARRIER_GLOBAL_EXPEDITED = 1 << 1
_MEMBARRIER_REGISTER_GLOBAL_EXPEDITED = 1 << 2


def full_fence() -> Fence:
    """A callable that is a sequentially consistent fence.

    In a compiled wheel it is C's. Else it is, on x86-64, the taking of a free lock, which executes
    an instruction with the lock prefix; elsewhere libatomic's fence or the kernel's membarrier.

    Raises:
        TransportError: none of these is available.
    """
    if native is not None:
        native_fence: Fence = native.fence
        return native_fence
    if platform.machine() in _X86_64:
        return _lock_fence()
    fence = libatomic_fence() or membarrier_fence()
    if fence is None:
        raise TransportError("no full memory fence found: install libatomic (libatomic1 in Debian)")
    return fence


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
        finally:  # even if a signal's handler raises in between
            release()

    return fence
