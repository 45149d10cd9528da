"""How many floating-point operations something does, by the element type that it does them in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .types import DType


@dataclass(frozen=True, slots=True)
class Flops:
    """Counts of floating-point operations: how long these take depends on the element type.

    Attributes:
        counts: pairs of an element type and a count above 0, in the order of `DType`.
    """

    counts: tuple[tuple[DType, int], ...] = ()

    @staticmethod
    def of(counts: Mapping[DType, int]) -> Flops:
        """Counts by element type, of which some may be 0."""
        return Flops(tuple((dtype, counts[dtype]) for dtype in DType if counts.get(dtype)))

    @property
    def total(self) -> int:
        """The operations in all element types."""
        return sum(count for _, count in self.counts)

    def scaled(self, numerator: int, denominator: int) -> Flops:
        """Each count times a fraction, rounded down."""
        return Flops.of({dtype: n * numerator // denominator for dtype, n in self.counts})

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.counts)

    def __str__(self) -> str:
        return "{" + ", ".join(f"{dtype}: {count}" for dtype, count in self.counts) + "}"

    @staticmethod
    def parse(text: str) -> Flops:
        """Read the form that `str()` writes.

        Raises:
            ValueError: `text` is not of that form.
        """
        is_set = text[:1] == "{" and text[-1:] == "}"
        parts = [part for part in text[1:-1].split(",") if part.strip()]
        pairs = [match.groups() for part in parts if (match := _COUNT.fullmatch(part))]
        counts = {DType(name): int(count) for name, count in pairs if name in _NAMES}
        if not is_set or len(counts) < len(parts):
            raise ValueError(
                f"'{text}' is no count of operations by element type; write {{bf16: 1024, f32: 8}}"
            )
        return Flops.of(counts)


NO_FLOPS = Flops()

_COUNT = re.compile(r"\s*(\w+)\s*:\s*(\d+)\s*")
_NAMES = frozenset(dtype.value for dtype in DType)
