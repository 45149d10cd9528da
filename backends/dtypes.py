"""The torch.dtype of each element type of the IR."""

from __future__ import annotations

import torch

from ..ir.types import DType, TensorType

TORCH_DTYPES: dict[DType, torch.dtype] = {
    dtype: getattr(torch, dtype.torch_name) for dtype in DType
}
_IR_DTYPES: dict[torch.dtype, DType] = {value: key for key, value in TORCH_DTYPES.items()}


def describe(value: object) -> str:
    """Describe a run-time value in the IR's words: `f32[8,512]`, or its class."""
    if not isinstance(value, torch.Tensor):
        return f"object ({type(value).__name__})"
    dtype = _IR_DTYPES.get(value.dtype)
    if dtype is None:
        return f"tensor of {value.dtype}, shape {tuple(value.shape)}"
    return str(TensorType(dtype, tuple(value.shape)))
