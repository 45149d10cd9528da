"""One rank's executions in flight: they take turns, each going on until it has to wait."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from .instance import Instance
from .turnstiles import Turnstiles

_OLDEST: Final = 4
"""How many executions are looked at in every turn."""


@dataclass(slots=True)
class Seat:
    """Where one execution of a graph at a time runs on a rank.

    Attributes:
        instances: one for each variant of the graph.
        close: gives back what they hold.
    """

    instances: tuple[Instance, ...]
    close: Callable[[], None]

    @property
    def busy(self) -> bool:
        """Whether an execution is in progress."""
        return any(instance.running for instance in self.instances)


class Resident:
    """A rank, as far as executions of graphs are concerned.

    Args:
        rank: which.
        shuffle: makes executions take turns in a random order and in small random numbers of
            instructions, to show that results do not depend on it.

    Attributes:
        turnstiles: of this rank's actors.
        in_flight: the executions that have started and not ended, in the order of their start.
    """

    def __init__(self, rank: int, shuffle: random.Random | None = None) -> None:
        self.rank = rank
        self.turnstiles = Turnstiles()
        self.in_flight: list[Instance] = []
        self._random = shuffle

    def begin(self, instance: Instance, inputs: Sequence[object], execution: int) -> None:
        """Start an execution, and go on with it as far as it comes."""
        instance.start(inputs, execution)
        self.in_flight.append(instance)
        if self._random is None and instance.advance():
            self.in_flight.pop()

    def turn(self) -> bool:
        """Go on with executions until each has to wait; whether any has moved.

        Actors take executions in the order of their start, so the oldest are the likeliest to
        move. While they do, the others are not looked at.
        """
        if self._random is not None:
            return self._shuffled(self._random)
        moved = ended = False
        for age, instance in enumerate(self.in_flight):
            if age >= _OLDEST and (moved or ended):
                break
            before = instance.pending
            if instance.advance():
                ended = True
            elif instance.pending is not before:
                moved = True
        if ended:
            self.in_flight = [instance for instance in self.in_flight if instance.running]
        return moved or ended

    def _shuffled(self, source: random.Random) -> bool:
        moved = False
        for instance in source.sample(self.in_flight, len(self.in_flight)):
            before = instance.pending
            ended = instance.advance_by(source.randint(1, 4))
            moved = moved or ended or instance.pending is None or instance.pending is not before
        self.in_flight = [instance for instance in self.in_flight if instance.running]
        return moved
