"""One rank's executions in flight: they take turns, each going on until it has to wait."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Final

from ..program.ticket_locks import TicketLocks
from .instance import Instance

_OLDEST: Final = 4
"""Executions that are looked at in every turn."""


@dataclass(slots=True)
class ExecutionContext:
    """The resources of a rank for one execution of a graph at a time.

    Attributes:
        instances: one for each variant of the graph.
        close: gives back what they hold; idempotent.
        reset: forgets their messages in flight, on all ranks between two barriers, and may be
            called twice; None where that cannot be done.
    """

    instances: tuple[Instance, ...]
    close: Callable[[], None]
    reset: Callable[[], None] | None = None

    @property
    def busy(self) -> bool:
        """True while an execution is in progress."""
        return any(instance.running for instance in self.instances)


class RankScheduler:
    """Schedules the executions of graphs that are in flight on one rank.

    Args:
        rank: the rank.
        shuffle: makes executions take turns in a random order and in small random numbers of
            instructions, to show that results do not depend on it.

    Attributes:
        locks: the ticket locks of this rank's actors.
        in_flight: the executions that have started and not ended, in the order of their start.
    """

    def __init__(self, rank: int, shuffle: random.Random | None = None) -> None:
        self.rank = rank
        self.locks = TicketLocks()
        self.in_flight: list[Instance] = []
        self._random = shuffle
        self._busy_in = 0

    def begin(self, instance: Instance, inputs: Sequence[object], execution: int) -> None:
        """Start an execution, and go on with it until it has to wait."""
        instance.start(inputs, execution)
        self.in_flight.append(instance)
        if self._random is not None:
            return
        self._busy_in = get_ident()
        try:
            if instance.engine.advance(instance):
                self.in_flight.pop()
        finally:
            self._busy_in = 0

    def has_kept(self, error: BaseException) -> bool:
        """True if `error`, which has come out of this rank's executions, leaves them in order.

        It interrupted a method, which has failed, and the execution goes on.
        """
        for instance in self.in_flight:
            if instance.kept is error:
                instance.kept = None
                return True
        return False

    @property
    def is_busy(self) -> bool:
        """True while a thread moves executions on."""
        return self._busy_in != 0

    @property
    def thread(self) -> int:
        """The thread that moves executions on, if one does; 0 if not."""
        return self._busy_in

    def give_up(self) -> None:
        """Forget all executions; each instance has been told."""
        self.in_flight = []
        self.locks.reset()

    def turn(self) -> bool:
        """Go on with executions until each has to wait; true if any has moved.

        Actors take executions in the order of their start, so the oldest are the likeliest to
        move. While they do, the others are not looked at.

        Raises:
            RuntimeError: as `check_idle`.
        """
        self.check_idle()
        self._busy_in = get_ident()
        try:
            return self._in_order() if self._random is None else self._shuffled(self._random)
        finally:
            self._busy_in = 0
            in_flight = self.in_flight
            if len(in_flight) == 1:
                if not in_flight[0].engine.running:
                    in_flight.pop()
            else:
                for instance in in_flight:
                    if not instance.engine.running:
                        # Also if Ctrl-C has come in the middle of another execution.
                        self.in_flight = [
                            candidate for candidate in in_flight if candidate.engine.running
                        ]
                        break

    def check_idle(self) -> None:
        """Check that executions of this rank are not being moved on.

        Raises:
            RuntimeError: another thread does that; or a method that an execution calls is running,
                and they cannot go on before it has returned.
        """
        if self._busy_in:
            if self._busy_in != get_ident():
                raise RuntimeError(
                    f"another thread is using the graphs of rank {self.rank}: use one thread, or a "
                    "lock around every call of a graph and of its futures"
                )
            raise RuntimeError(
                f"a method that runs on rank {self.rank} starts an execution, or asks for one's "
                "result; executions of this rank go on only when the method has returned. Call "
                "the other actor in the step, or do it in the driver's own code"
            )

    def _in_order(self) -> bool:
        moved = False
        for age, instance in enumerate(self.in_flight):
            if age >= _OLDEST and moved:
                break
            engine = instance.engine
            before = engine.pending
            if engine.advance(instance) or engine.pending is not before:
                moved = True
        return moved

    def _shuffled(self, source: random.Random) -> bool:
        moved = False
        for instance in source.sample(self.in_flight, len(self.in_flight)):
            engine = instance.engine
            before = engine.pending
            ended = engine.advance(instance, source.randint(1, 4))
            moved = moved or ended or engine.pending is None or engine.pending is not before
        return moved
