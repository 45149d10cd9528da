"""NVIDIA GPUs."""

from __future__ import annotations

from typing import Any

import torch

from ...ir.types import DType
from ..device import Fabric
from . import cuda_driver
from .accelerator import Accelerator

NCCL = Fabric(
    "nccl",
    frozenset(
        {
            DType.F64,
            DType.F32,
            DType.F16,
            DType.BF16,
            DType.I64,
            DType.I32,
            DType.I8,
            DType.U64,
            DType.U32,
            DType.U8,
            DType.BOOL,
        }
    ),
)
"""NCCL, with the types that it reduces; it moves others, such as 16-bit integers, as well."""


def make(index: int) -> Accelerator:
    """The GPU `index` of this process."""
    current: Any = torch._C._cuda_getCurrentRawStream
    return Accelerator(
        "cuda",
        index,
        NCCL,
        handle="cuda_stream",
        graph="CUDAGraph",
        current=current,
        end_pool=_end_pool,
        capture_nodes=cuda_driver.load(),
    )


def _end_pool(index: int, pool: tuple[int, int]) -> None:
    """End a capture to a pool, as torch's CUDA graph trees do."""
    torch._C._cuda_endAllocateToPool(index, pool)
    torch._C._cuda_releasePool(index, pool)
