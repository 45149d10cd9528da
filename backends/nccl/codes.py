"""NCCL's numbers: results, element types and reductions.

Source: `nccl.h`, https://github.com/NVIDIA/nccl.
"""

from __future__ import annotations

from ...ir.attributes import ReduceOp
from ...ir.types import DType

SUCCESS, IN_PROGRESS = 0, 7

CODES: dict[DType, int] = {
    DType.I8: 0,
    DType.U8: 1,
    DType.I32: 2,
    DType.U32: 3,
    DType.I64: 4,
    DType.U64: 5,
    DType.F16: 6,
    DType.F32: 7,
    DType.F64: 8,
    DType.BF16: 9,
    DType.BOOL: 1,
}
"""`ncclDataType_t`; booleans travel as bytes."""

BYTES = 1
"""The element type of messages, which are moved and not looked into."""

REDUCTIONS: dict[ReduceOp, int] = {
    ReduceOp.SUM: 0,
    ReduceOp.PROD: 1,
    ReduceOp.MAX: 2,
    ReduceOp.MIN: 3,
    ReduceOp.AVG: 4,
}
"""`ncclRedOp_t`."""
