"""The limit of `compile(memory=...)`: bytes of each rank, as numbers or as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_UNITS = {"B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}
_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*((?:[KMGT]i?)?B)")


@dataclass(frozen=True)
class MemoryLimit:
    """The most bytes that the program of each rank may hold.

    Attributes:
        bytes: one number for all ranks, or one for each.
    """

    bytes: tuple[int, ...]

    @staticmethod
    def of(memory: object) -> MemoryLimit:
        """The limit that a user gives.

        Args:
            memory: an int, or a text such as `40GiB` or `512MB`; or a list or tuple of such, one
                for each rank.

        Raises:
            TypeError: it is something else.
            ValueError: a text says no number of bytes, or a number is not above 0.
        """
        if isinstance(memory, (list, tuple)):
            if not memory:
                raise ValueError("memory=[]: give bytes for each rank, or for all of them")
            return MemoryLimit(tuple(map(_bytes, memory)))
        return MemoryLimit((_bytes(memory),))

    def of_ranks(self, count: int, in_flight: int) -> Sequence[int]:
        """The limit of each rank for one execution.

        Args:
            count: the number of ranks.
            in_flight: the executions that a rank holds at once.

        Raises:
            ValueError: there are limits for another number of ranks.
        """
        if len(self.bytes) not in (1, count):
            raise ValueError(
                f"memory= has {len(self.bytes)} numbers, and the world has {count} ranks; give one "
                "for each, or one for all"
            )
        limits = self.bytes if len(self.bytes) == count else self.bytes * count
        return [limit // max(1, in_flight) for limit in limits]


def _bytes(memory: object) -> int:
    if isinstance(memory, str):
        match = _TEXT.fullmatch(memory.strip())
        if match is None:
            raise ValueError(
                f"memory={memory!r}: a number and a unit, such as '40GiB', '24GB' or '500000B'"
            )
        size = int(float(match[1]) * _UNITS[match[2]])
    elif isinstance(memory, int) and not isinstance(memory, bool):
        size = memory
    else:
        raise TypeError(
            f"memory={memory!r}: bytes as an int, a text such as '40GiB', or a list of one for "
            "each rank"
        )
    if size <= 0:
        raise ValueError(f"memory={memory!r}: more than 0 bytes")
    return size
