"""Counts of floating-point operations, by the element type in which they are done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .types import DType

WORK_OF_BYTE = 100
"""The floating-point operations that take as long as to read or write a byte.

Of accelerators since 2020 it is between 100 and 300, in bfloat16.
"""

WORK_OF_COPIED_BYTE = 5 * WORK_OF_BYTE
"""The same for a byte that a device copies to its host, or back, while it computes.

A copy reads or writes the device's memory once. It counts more, since memory of the host is pinned
for it, and since the computation waits if the link is slower than expected. So what an operator
without products gives is computed again rather than copied, and what a product gives is copied.
"""

WORK_OF_MILLISECOND = 4e11
"""The floating-point operations of a millisecond, where no time is measured.

With `WORK_OF_BYTE` these are 4 TB/s of memory, as accelerators of 2024 have.
"""


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
