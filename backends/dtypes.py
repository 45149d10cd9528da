"""The torch.dtype of each element type of the IR."""

from __future__ import annotations

import torch

from ..ir.types import DType, TensorType

TORCH_DTYPES: dict[DType, torch.dtype] = {
    DType.F64: torch.float64,
    DType.F32: torch.float32,
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.F8E4M3: torch.float8_e4m3fn,
    DType.F8E5M2: torch.float8_e5m2,
    DType.C64: torch.complex64,
    DType.C128: torch.complex128,
    DType.I64: torch.int64,
    DType.I32: torch.int32,
    DType.I16: torch.int16,
    DType.I8: torch.int8,
    DType.U64: torch.uint64,
    DType.U32: torch.uint32,
    DType.U16: torch.uint16,
    DType.U8: torch.uint8,
    DType.BOOL: torch.bool,
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
