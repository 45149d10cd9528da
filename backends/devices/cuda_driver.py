"""Read and set the dependencies of streams in a CUDA graph capture, by calls of CUDA's driver.

`cuStreamGetCaptureInfo_v2` and `cuStreamUpdateCaptureDependencies` are of CUDA 11.3; torch has no
way to call them. https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__STREAM.html
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

_ACTIVE = 1
"""CU_STREAM_CAPTURE_STATUS_ACTIVE."""

_SET = 1
"""CU_STREAM_SET_CAPTURE_DEPENDENCIES: replaces the dependencies that a stream has."""


class DriverNodes:
    """The dependencies of streams that are being captured.

    Raises:
        OSError: the driver's library is not there.
        AttributeError: the library has no such calls.
    """

    def __init__(self) -> None:
        driver = ctypes.CDLL("libcuda.so.1")
        self._info: Any = driver.cuStreamGetCaptureInfo_v2
        self._update: Any = driver.cuStreamUpdateCaptureDependencies

    def of(self, stream: int) -> tuple[int, ...] | None:
        """The nodes that the next work on a stream depends on; None if it is not captured."""
        status, number = ctypes.c_int(), ctypes.c_uint64()
        graph, nodes, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
        results = (status, number, graph, nodes, count)
        _check(self._info(ctypes.c_void_p(stream), *map(ctypes.byref, results)))
        if status.value != _ACTIVE:
            return None
        if not nodes.value:
            return ()
        return tuple((ctypes.c_size_t * count.value).from_address(nodes.value))

    def replace(self, stream: int, nodes: Sequence[int]) -> None:
        """Let the next work on a stream depend on these nodes alone."""
        array = (ctypes.c_size_t * len(nodes))(*nodes)
        count, flags = ctypes.c_size_t(len(nodes)), ctypes.c_uint(_SET)
        _check(self._update(ctypes.c_void_p(stream), array, count, flags))


def load() -> DriverNodes | None:
    """The driver's calls; None if the driver lacks them, and graphs then keep all edges."""
    try:
        return DriverNodes()
    except (OSError, AttributeError):
        return None


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"CUDA's driver gives error {error} for a stream that is captured")
