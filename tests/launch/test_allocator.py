"""Ranks keep the memory that they free."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, sys
from cg.launch.world.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def step():
    blocks = [libc.malloc(4 << 20) for _ in range(8)]
    for block in blocks:
        libc.memset(block, 1, 4 << 20)
    for block in blocks:
        libc.free(block)
step(), step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that gives memory back")
def test_freed_memory_is_taken_again_without_page_faults() -> None:
    def faults(how: str) -> int:
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
        command = [sys.executable, "-c", PROGRAM, how]
        ended = subprocess.run(
            command, env=plain, capture_output=True, text=True, timeout=60, check=True
        )
        return int(ended.stdout)

    pages = (32 << 20) // os.sysconf("SC_PAGESIZE")
    assert faults("keep") < pages // 10
    assert faults("give back") > pages // 2
