"""A GPU with a kernel that spins, and calls of the host that are timed meanwhile."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable

PATIENCE = 3.0
"""Seconds for which the kernel spins."""

_SPIN = r"""
extern "C" __global__ void spin(volatile int* flag) { while (*flag == 0) __nanosleep(1000); }
"""


class Flag:
    """A word that a GPU can read, and that another process sets a while after it is asked to."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._words = (ctypes.c_int * 2).from_buffer(self._memory)
        parent = os.getpid()
        if os.fork() == 0:
            while os.getppid() == parent:
                if self._words[1]:
                    time.sleep(PATIENCE)
                    self._words[:] = [1, 0]
                time.sleep(0.01)
            os._exit(0)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._words)

    def set(self, value: int) -> None:
        self._words[0] = value

    def set_later(self) -> None:
        self._words[1] = 1


class Probe:
    """A device with a kernel that spins, and what calls need that are made ahead of it."""

    def __init__(self) -> None:
        flag = self._flag = Flag()  # ahead of CUDA, which a fork does not survive
        import cupy
        import torch

        self.torch, self.cupy = torch, cupy
        torch.cuda.set_device(0)
        cupy.cuda.runtime.hostRegister(flag.address, mmap.PAGESIZE, 0)
        self.side = torch.cuda.Stream()
        self.compute = torch.cuda.Stream()
        self._spin = cupy.RawKernel(_SPIN, "spin")
        self.x = torch.randn(512, 512, device="cuda", requires_grad=True)
        self.w = torch.randn(512, 512, device="cuda")
        self.pinned = torch.zeros(1 << 16).pin_memory()
        self.pageable = torch.zeros(1 << 16)
        self.on_device = torch.zeros(1 << 16, device="cuda")
        with torch.cuda.stream(self.compute):
            for _ in range(3):
                self.body()
            self.on_device.copy_(self.pageable)
        flag.set(1)
        self._start()  # the module is loaded, and the kernel has run once
        torch.cuda.synchronize()
        flag.set(0)

    def _start(self) -> None:
        with self.cupy.cuda.ExternalStream(self.side.cuda_stream):
            self._spin((1,), (1,), (self._flag.address,))

    def body(self) -> None:
        """A forward and a backward of some kernels."""
        h = self.torch.nn.functional.gelu(self.x @ self.w)
        self.torch.softmax(h @ self.w, -1).sum().backward()

    def spin(self) -> None:
        """Let the kernel spin, for a while."""
        self._start()
        time.sleep(0.05)
        self._flag.set_later()

    def time(self, name: str, call: Callable[[], object]) -> object:
        """Make a call, and print whether it has waited."""
        began = time.perf_counter()
        result = call()
        took = time.perf_counter() - began
        verdict = "waits" if took > PATIENCE / 2 else "returns"
        print(f"{name:60} {verdict:8} {took:8.4f} s", flush=True)
        return result

    def runtime(self) -> ctypes.CDLL:
        """CUDA's runtime, as torch has loaded it."""
        with open("/proc/self/maps") as maps:
            paths = {line.split()[-1] for line in maps if "libcudart" in line}
        return ctypes.CDLL(min(paths))
