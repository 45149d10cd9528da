"""The element type in which ranks add up summands: the one in which torch sums on one rank."""

from __future__ import annotations

import torch


def accumulation_type(dtype: torch.dtype) -> torch.dtype:
    """The type of partial sums: float32 for the types of 16 bits, else the type itself."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return torch.complex64 if dtype is torch.complex32 else dtype


def accumulated(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the accumulation type of its own."""
    return tensor.to(accumulation_type(tensor.dtype))
