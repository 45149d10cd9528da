"""A graph whose executions one rank drives, as one process sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...ir.module import Module
from ..failures.poison import Poison
from .instance import Instance
from .outcomes import Outcome, resolve
from .participants import participants, woken_by_command
from .rank_scheduler import Seat

Rebuild = Callable[[Sequence[Any]], Any]
"""Makes what the step returns of what the driver's program returns."""


class Graph:
    """The part of a graph that this process holds.

    Args:
        name: of the step, for messages.
        driver: the rank that starts executions.
        modules: scheduled, one for each variant.
        seats: for each rank that this process plays, where its executions run.
        rebuilds: for each variant; None where the driver gets nothing.

    Attributes:
        number: of the graph in its world; set when it is opened.
        world: number of ranks.
        participants: the ranks besides the driver that executions need.
        wake: those of them that a command has to wake.
        free: the driver's seats that have no execution.
        count: how many executions the driver has started.
        started: for each other rank, how many it has.
        closed: the ranks on which the graph is closed.
        patience: seconds that the driver waits for a free seat; None for no limit.
        limit: seconds without a move, after which the driver waits no longer to close the graph,
            or for ranks to start over; None for no limit.
        overdue: whether it has waited that long to close it.
    """

    def __init__(
        self,
        name: str,
        driver: int,
        modules: Sequence[Module],
        seats: Mapping[int, Sequence[Seat]],
        rebuilds: Sequence[Rebuild | None],
    ) -> None:
        self.name = name
        self.driver = driver
        self.seats = seats
        self.number = -1
        self.world = modules[0].world
        self.participants = participants(modules, driver)
        self.wake = woken_by_command(modules, driver)
        self.count = 0
        self.started = dict.fromkeys(seats, 0)
        self.closed: set[int] = set()
        self.patience: float | None = None
        self.limit: float | None = None
        self.overdue = False
        mine = seats.get(driver, ())
        self.free = list(reversed(range(len(mine))))
        self.futures: list[Outcome | None] = [None] * len(mine)
        for index, seat in enumerate(mine):
            for instance, rebuild in zip(seat.instances, rebuilds, strict=True):
                instance.on_end = self._resolver(index, rebuild)
                instance.on_failure = self._failer(index)

    @property
    def cannot_restart(self) -> bool:
        """True if something on its ranks cannot be brought back to its beginning."""
        return any(seat.reset is None for seats in self.seats.values() for seat in seats)

    @property
    def in_flight(self) -> int:
        """The number of executions in flight; for the driver."""
        return len(self.futures) - len(self.free)

    def is_idle(self, rank: int) -> bool:
        """True if no execution is in progress on a rank of this process."""
        return not any(seat.busy for seat in self.seats[rank])

    def go_on_from(self, execution: int, ranks: Iterable[int]) -> None:
        """Give the next execution this number; of the other ranks, on those of this process."""
        self.count = execution
        for rank in ranks:
            self.started[rank] = execution

    def release(self, rank: int) -> None:
        """Give back what the graph holds on a rank."""
        for seat in self.seats[rank]:
            seat.close()
        self.closed.add(rank)  # last: an interrupted release is done again

    def _resolver(self, seat: int, rebuild: Rebuild | None) -> Callable[[Instance], None]:
        futures, free = self.futures, self.free

        def end(instance: Instance) -> None:
            future = futures[seat]
            assert future is not None
            if not future.is_done:
                value = None if rebuild is None else rebuild(instance.outputs)
                resolve(future, value, None, instance.delivery)
            instance.outputs = ()
            instance.delivery = None
            futures[seat] = None  # a future that is not done can always be found
            free.append(seat)

        return end

    def _failer(self, seat: int) -> Callable[[Poison], None]:
        def fail(poison: Poison) -> None:
            future = self.futures[seat]
            assert future is not None
            resolve(future, None, poison)

        return fail
