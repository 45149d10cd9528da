"""What the driver asks of a rank: its records, as they come, and what each of them means there."""

from __future__ import annotations

from collections.abc import Callable

from .records import Record

Order = Callable[[], bool]
"""Does what a record asks of a rank; false if its time is not come."""


class Inbox:
    """The records of one driver for one rank.

    Args:
        rank: whose.
        read: the next record, or 0 (`Records.reader`).
        understand: what to do for a record; asked once for each that differs.

    Attributes:
        rank: whose.
    """

    __slots__ = ("_held", "_orders", "_read", "_understand", "rank")

    def __init__(
        self, rank: int, read: Callable[[], int], understand: Callable[[int, Record], Order]
    ) -> None:
        self.rank = rank
        self._read = read
        self._understand = understand
        self._held = 0
        self._orders: dict[int, Order] = {}

    def take(self) -> bool:
        """Do what the next record asks for.

        False if there is no record, or its time is not come. What a record waits for are
        executions before it, so it is always the next to be done.
        """
        record = self._held or self._read()
        if not record:
            return False
        self._held = 0
        order = self._orders.get(record)
        if order is None:
            order = self._orders[record] = self._understand(self.rank, Record.unpack(record))
        done = order()
        if not done:
            self._held = record
        return done

    def drop(self) -> int:
        """The next record, which will not be done, or 0."""
        record = self._held or self._read()
        self._held = 0
        return record

    def forget(self, graph: int) -> None:
        """The graph with this number is closed."""
        for record in [r for r in self._orders if Record.unpack(r).graph == graph]:
            del self._orders[record]
