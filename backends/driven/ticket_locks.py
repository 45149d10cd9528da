"""Keeps the order of an actor's state: executions pass each actor of a rank one after the other.

An execution takes a ticket for each of its actors when it starts. Before its first call on an actor
that may touch state it waits until every earlier ticket has gone through; after its last such call
it lets the next one pass. Tickets are taken in the order in which executions start, which is the
same on all ranks, so no two executions can wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

STREAMS: Final = "the streams of the device"
"""The turnstile of a rank's streams, beside those of its actors, whose names have no spaces."""


class Turnstile:
    """The order in which executions use one actor.

    Attributes:
        issued: how many tickets have been taken.
        passed: how many executions have made their last call.
    """

    __slots__ = ("issued", "passed")

    def __init__(self) -> None:
        self.issued = 0
        self.passed = 0


class Turnstiles:
    """The turnstiles of one rank, by actor; shared by all graphs."""

    def __init__(self) -> None:
        self._by_actor: dict[str, Turnstile] = {}

    def of(self, actor: str) -> Turnstile:
        """The turnstile of an actor."""
        found = self._by_actor.get(actor)
        if found is None:
            found = self._by_actor[actor] = Turnstile()
        return found

    def reset(self) -> None:
        """Forget all tickets; no execution is in progress."""
        for stile in self._by_actor.values():
            stile.issued = stile.passed = 0


class Tickets:
    """The tickets of one bound program, taken anew for each of its executions."""

    def __init__(self, turnstiles: Turnstiles) -> None:
        self._turnstiles = turnstiles
        self._stiles: list[Turnstile] = []
        self._numbers: list[int] = []

    @property
    def is_empty(self) -> bool:
        """Whether the program uses no actor."""
        return not self._stiles

    def take(self) -> None:
        """Take a ticket for each actor."""
        numbers = self._numbers
        for index, stile in enumerate(self._stiles):
            numbers[index] = stile.issued
            stile.issued += 1

    def gate(self, actor: str) -> tuple[Callable[[], bool], Callable[[], bool]]:
        """The instructions that wait for the actor's turnstile, and that let the next pass."""
        stile, numbers, index = self._turnstiles.of(actor), self._numbers, len(self._stiles)
        self._stiles.append(stile)
        numbers.append(0)

        def wait() -> bool:
            return stile.passed == numbers[index]

        def go_on() -> bool:
            stile.passed += 1
            return True

        return wait, go_on
