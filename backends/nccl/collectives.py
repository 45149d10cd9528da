"""The reductions of NCCL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ...ir.attributes import ReduceOp
from ...ir.types import DType
from ..streams.collectives import Collectives, Reduction, as_logic, does_not_reduce
from .codes import CODES, REDUCTIONS


class NcclCollectives(Collectives):
    """A collective in calls of NCCL, which averages floating point alone; integers are divided."""

    codes: ClassVar[Mapping[DType, int]] = CODES
    numbers: ClassVar[Mapping[ReduceOp, int]] = REDUCTIONS

    def reduction(self, op: ReduceOp, dtype: DType) -> Reduction:
        """The reduction of elements of a type."""
        if dtype not in CODES:
            raise does_not_reduce("NCCL", dtype)
        if dtype is DType.BOOL:
            return Reduction(as_logic(op), dtype)
        if op is ReduceOp.AVG and dtype.value[0] in "iu":
            return Reduction(ReduceOp.SUM, dtype, divides=True)
        return Reduction(op, dtype)
