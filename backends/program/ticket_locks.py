"""Ticket locks: executions pass each actor of a rank in the order of their start.

An execution takes a ticket for each of its actors when it starts. Before its first call on an actor
that may touch state it waits until every earlier ticket has gone through; after its last such call
it lets the next one pass. Tickets are taken in the order in which executions start, which is the
same on all ranks, so no two executions can wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from ...ir.attributes import Effect
from ...ir.ops import Call, Collective, Send, Value
from ...ir.ops.module import Function, FunctionKind, Program
from ..device import Event

STREAMS: Final = "the streams of the device"
"""The name of the lock of a rank's streams; names of actors have no spaces."""


class TicketLock:
    """The order in which executions use one actor.

    Attributes:
        issued: how many tickets have been taken.
        passed: how many executions have made their last call.
        ended: an event behind the last tail that has used the actor; see
            `devices/programs/tail.py`.
    """

    __slots__ = ("ended", "issued", "passed")

    def __init__(self) -> None:
        self.issued = 0
        self.passed = 0
        self.ended: Event | None = None


class TicketLocks:
    """The locks of one rank, by actor; shared by all graphs."""

    def __init__(self) -> None:
        self._by_actor: dict[str, TicketLock] = {}

    def of(self, actor: str) -> TicketLock:
        """The lock of an actor."""
        lock = self._by_actor.get(actor)
        if lock is None:
            lock = self._by_actor[actor] = TicketLock()
        return lock

    def reset(self) -> None:
        """Forget all tickets; no execution is in progress."""
        for lock in self._by_actor.values():
            lock.issued = lock.passed = 0


class Tickets:
    """The tickets of one bound program, taken anew for each of its executions."""

    def __init__(self, locks: TicketLocks) -> None:
        self._locks = locks
        self._used: list[TicketLock] = []
        self._numbers: list[int] = []

    @property
    def is_empty(self) -> bool:
        """True if the program uses no actor."""
        return not self._used

    def take(self) -> None:
        """Take a ticket for each actor."""
        numbers = self._numbers
        for index, lock in enumerate(self._used):
            numbers[index] = lock.issued
            lock.issued += 1

    def lock(self, actor: str) -> TicketLock:
        """The actor's lock."""
        return self._locks.of(actor)

    def acquire_and_release(self, actor: str) -> tuple[Callable[[], bool], Callable[[], bool]]:
        """The instructions that wait for the actor's lock, and that let the next pass."""
        lock, numbers, index = self._locks.of(actor), self._numbers, len(self._used)
        self._used.append(lock)
        numbers.append(0)

        def acquire() -> bool:
            return lock.passed == numbers[index]

        def release() -> bool:
            lock.passed += 1
            return True

        return acquire, release


def locked_ops(
    program: Program, functions: Mapping[str, Function], registers: Mapping[Value, int]
) -> dict[str, list[int]]:
    """The ops that need an actor's lock, by actor; it is held from the first to the last.

    Calls that touch no state need no lock. An actor's next call may change a value that an opaque
    method has made, so the lock is held until the value has been used and sent.
    """
    indices_of: dict[str, list[int]] = {}
    makers: dict[int, list[str]] = {}
    for index, op in enumerate(program.ops):
        if isinstance(op, Call):
            function = functions[op.fn.name]
            if function.actor is not None and function.effect is not Effect.PURE:
                states = [name for name, _ in function.touches if name is not None]
                for name in states:
                    indices_of.setdefault(name, []).append(index)
                if function.kind is FunctionKind.OPAQUE:
                    makers.update((registers[value], states) for value in op.results)
        if isinstance(op, Call | Send | Collective):
            for value in op.operands:
                for name in makers.get(registers[value], ()):
                    indices_of[name].append(index)
    return indices_of
