"""When messages of the virtual world complete: one after the other on each stream of a rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

from ...ir.ops import Collective, Recv, Send, batch_of


class Place(Protocol):
    """Where ports meet: a channel."""

    def match(self) -> None:
        """Complete what can be completed."""


class End(Protocol):
    """A port that has been started, as `Traffic` sees it.

    Attributes:
        op: what it is the port of.
        line: what its stream has yet to complete, in order; None without a stream.
        place: where it meets the other ends.
    """

    @property
    def op(self) -> Send | Recv | Collective: ...

    @property
    def line(self) -> deque[End] | None: ...

    @property
    def place(self) -> Place: ...


class Traffic:
    """The order in which the messages of one fabric complete.

    A message completes when all its ends are first on their streams; those of a batch are first
    together. It then lets those behind it on these streams try again.

    Attributes:
        held: channel and number of a message that must not complete yet, if any.
    """

    def __init__(self) -> None:
        self.held: tuple[int | None, int | None] | None = None
        self._lines: dict[object, deque[End]] = {}
        self._agenda: deque[Place] = deque()
        self._is_busy = False

    def line(self, key: object) -> deque[End]:
        """The line of a stream."""
        return self._lines.setdefault(key, deque())

    def start(self, end: End) -> None:
        """Put a port on its stream, and see what completes."""
        if end.line is not None:
            end.line.append(end)
        self.settle(end.place)

    def settle(self, place: Place) -> None:
        """Complete what can be completed at a place, and whatever that allows."""
        self._agenda.append(place)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._agenda:
                self._agenda.popleft().match()
        finally:
            self._agenda.clear()
            self._is_busy = False

    def may_complete(self, ends: Sequence[End]) -> bool:
        """Whether nothing but the message itself is in the way."""
        if (ends[0].op.chan, ends[0].op.seq) == self.held:
            return False
        return all(map(_is_first, ends))

    def completed(self, ends: Sequence[End]) -> None:
        """Take a message off the streams of its ends."""
        for end in ends:
            if end.line is not None:
                end.line.remove(end)
                first = takewhile(_is_first, end.line)
                self._agenda += [other.place for other in first]

    def reset(self) -> None:
        """Forget all that is on its way."""
        for line in self._lines.values():
            line.clear()


def _is_first(end: End) -> bool:
    """Whether nothing is ahead of a port on its stream but what is in one batch with it."""
    if end.line is None or end.line[0] is end:
        return True
    batch = batch_of(end.op)
    return batch is not None and batch == batch_of(end.line[0].op)
