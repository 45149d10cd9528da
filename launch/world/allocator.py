"""Let a rank keep the host memory that it frees, for its next step to take again.

glibc gives large blocks, and the free end of its heap, back to the system. A step that frees its
gradients then pays for fresh pages in the next one: each is a page fault, and is filled with zeros.
"""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_LARGEST = 32 << 20
"""Bytes of the largest blocks that glibc takes from its heap."""


def keep_freed_memory() -> bool:
    """Keep memory that this process frees, up to 32 MiB a block; returns whether its libc can."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, -1))
