"""Counts of floating-point operations, by the element type in which they are done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .types import DType


@dataclass(frozen=True, slots=True)
class Flops:
    """Counts of floating-point operations by element type, on which their duration depends.

    Attributes:
        counts: pairs of an element type and a count above 0, in the order of `DType`.
    """

    counts: tuple[tuple[DType, int], ...] = ()

    @staticmethod
    def of(counts: Mapping[DType, int]) -> Flops:
        """Counts from a mapping by element type; counts of 0 are dropped."""
        return Flops(tuple((dtype, counts[dtype]) for dtype in DType if counts.get(dtype)))

    @property
    def total(self) -> int:
        """The operations in all element types."""
        return sum(count for _, count in self.counts)

    def __bool__(self) -> bool:
        """True if there are any operations."""
        return bool(self.counts)

    def __str__(self) -> str:
        return "{" + ", ".join(f"{dtype}: {count}" for dtype, count in self.counts) + "}"


NO_FLOPS = Flops()
