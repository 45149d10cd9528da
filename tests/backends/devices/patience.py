"""How long a test waits for what has to come, and the device of tests."""

from __future__ import annotations

from cg.backends.fake.device import FakeDevice

PATIENCE = 120.0
"""Seconds after which a wait is a deadlock."""

ASSERTED = (
    "CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in https://docs.nvidia."
    "com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\nCUDA kernel errors "
    "might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with "
    "`TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
"""The error of torch 2.11 by whatever is asked of a device on which a kernel has asserted."""


def loose_device(index: int = 0, delay: float = 0.0) -> FakeDevice:
    """A fake device whose host waits only where it must: what is ordered wrongly shows."""
    return FakeDevice(index, delay, strict=False, patience=PATIENCE)
