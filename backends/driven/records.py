"""Records: what the driver tells all other ranks to run, in one order for all graphs.

A record is a number of 40 bits, so that a transport can publish it, together with a count, as one
word of 64.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

GRAPHS: Final = 1 << 18
VARIANTS: Final = 1 << 10
SEATS: Final = 1 << 10
BITS: Final = 40


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

    def publisher(self, to: Sequence[int], wake: Sequence[int]) -> Callable[[int], None]:
        """Tells other ranks of a record; for the driver.

        It may wait for a rank that lags far behind.

        Args:
            to: the ranks that it concerns.
            wake: those of them that are woken for it if they sleep.
        """

    def reader(self, rank: int) -> Callable[[], int]:
        """Gives the next record for a rank that this process plays, or 0 if there is none yet."""

    def mend(self) -> None:
        """On the driver: be ready for the next record after one that was interrupted."""


class VirtualRecords:
    """Records in lists, for a process that plays all ranks."""

    def __init__(self) -> None:
        self._records: dict[int, deque[int]] = {}

    def publisher(self, to: Sequence[int], wake: Sequence[int]) -> Callable[[int], None]:
        """See `Records`."""
        lists = [self._of(rank) for rank in to]

        def put(record: int) -> None:
            for records in lists:
                records.append(record)

        return put

    def reader(self, rank: int) -> Callable[[], int]:
        """See `Records`."""
        records = self._of(rank)

        def take() -> int:
            return records.popleft() if records else 0

        return take

    def mend(self) -> None:
        """See `Records`; nothing can be half done."""

    def _of(self, rank: int) -> deque[int]:
        return self._records.setdefault(rank, deque())
