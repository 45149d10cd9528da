"""Records: what the driver tells all other ranks to run, in one order for all graphs.

A record is a number of 40 bits, so that a transport can publish it, together with a count, as one
word of 64.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

GRAPHS, VARIANTS, SEATS = 1 << 18, 1 << 10, 1 << 10
BITS = 40


class Kind(enum.IntEnum):
    """What a record asks for."""

    EXECUTE = 1
    CLOSE = 2


@dataclass(frozen=True, slots=True)
class Record:
    """One record, taken apart.

    Attributes:
        kind: what to do.
        graph: with which graph, by its number in the world.
        variant: which of its variants to execute.
        seat: on which of its instances.
    """

    kind: Kind
    graph: int
    variant: int = 0
    seat: int = 0

    def pack(self) -> int:
        """The record as a number of `BITS` bits, not 0."""
        return (((self.kind * GRAPHS) + self.graph) * VARIANTS + self.variant) * SEATS + self.seat

    @staticmethod
    def unpack(number: int) -> Record:
        """The inverse of `pack`."""
        rest, seat = divmod(number, SEATS)
        rest, variant = divmod(rest, VARIANTS)
        kind, graph = divmod(rest, GRAPHS)
        return Record(Kind(kind), graph, variant, seat)


class Records(Protocol):
    """Carries records from the driver to all other ranks, in order."""

    def publisher(self, wake: Sequence[int]) -> Callable[[int], None]:
        """Tells all other ranks of a record; for the driver.

        It may wait for a rank that lags far behind.

        Args:
            wake: the ranks that are woken for it if they sleep; the others may take their time.
        """

    def reader(self, rank: int) -> Callable[[], int]:
        """Gives the next record for a rank that this process plays, or 0 if there is none yet."""


class VirtualRecords:
    """Records in a list, for a process that plays all ranks."""

    def __init__(self) -> None:
        self._records: list[int] = []
        self._first = 0
        self._next: dict[int, int] = {}

    def publisher(self, wake: Sequence[int]) -> Callable[[int], None]:
        """See `Records`."""
        return self._records.append

    def reader(self, rank: int) -> Callable[[], int]:
        """See `Records`."""
        self._next.setdefault(rank, self._first + len(self._records))

        def take() -> int:
            at = self._next[rank] - self._first
            if at == len(self._records):
                return 0
            self._next[rank] += 1
            record = self._records[at]
            self._forget()
            return record

        return take

    def _forget(self) -> None:
        """Drop what every rank has taken."""
        done = min(self._next.values()) - self._first
        if done >= 256:
            del self._records[:done]
            self._first += done
