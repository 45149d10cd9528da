"""A graph whose executions one rank drives, as one process sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...ir.ops.module import Module
from ..failures.participants import participants, woken_by_command
from ..poison import Poison
from .instance import Instance
from .outcomes import Outcome, resolve
from .rank_scheduler import ExecutionContext

Rebuild = Callable[[Sequence[Any]], Any]
"""Makes the step's result from what the driver's program returns."""


class DrivenGraph:
    """The part of a graph that this process holds.

    Args:
        name: the step's name, for messages.
        driver: the rank that starts executions.
        modules: the scheduled modules, one for each variant.
        contexts: the execution contexts of each rank that this process plays.
        rebuilds: one for each variant; None where the driver gets nothing.

    Attributes:
        number: the graph's number in its world; set when it is opened.
        world: number of ranks.
        participants: the ranks besides the driver that executions need.
        wake: those of them that a command has to wake.
        free: the driver's contexts that have no execution, by index.
        count: how many executions the driver has started.
        started: how many executions each rank of this process has started, as one that serves.
        closed: the ranks on which the graph is closed.
        patience: seconds that the driver waits for a free execution context; None for no limit.
        limit: seconds without a move, after which the driver waits no longer to close the graph,
            or for ranks to start over; None for no limit.
        overdue: whether the driver has waited that long to close the graph.
    """

    def __init__(
        self,
        name: str,
        driver: int,
        modules: Sequence[Module],
        contexts: Mapping[int, Sequence[ExecutionContext]],
        rebuilds: Sequence[Rebuild | None],
    ) -> None:
        self.name = name
        self.driver = driver
        self.contexts = contexts
        self.number = -1
        self.world = modules[0].world
        self.participants = participants(modules, driver)
        self.wake = woken_by_command(modules, driver)
        self.count = 0
        self.started = dict.fromkeys(contexts, 0)
        self.closed: set[int] = set()
        self.patience: float | None = None
        self.limit: float | None = None
        self.overdue = False
        driver_contexts = contexts.get(driver, ())
        self.free = list(reversed(range(len(driver_contexts))))
        self.futures: list[Outcome | None] = [None] * len(driver_contexts)
        for index, context in enumerate(driver_contexts):
            for instance, rebuild in zip(context.instances, rebuilds, strict=True):
                instance.on_end = self._resolver(index, rebuild)
                instance.on_failure = self._failer(index)

    @property
    def cannot_restart(self) -> bool:
        """True if something on its ranks cannot be brought back to its beginning."""
        return any(
            context.reset is None for contexts in self.contexts.values() for context in contexts
        )

    @property
    def in_flight(self) -> int:
        """The number of executions in flight; for the driver."""
        return len(self.futures) - len(self.free)

    def is_idle(self, rank: int) -> bool:
        """True if no execution is in progress on a rank of this process."""
        return not any(context.busy for context in self.contexts[rank])

    def go_on_from(self, execution: int, ranks: Iterable[int]) -> None:
        """Give the next execution this number, on the driver and on `ranks`, which serve."""
        self.count = execution
        for rank in ranks:
            self.started[rank] = execution

    def release(self, rank: int) -> None:
        """Give back what the graph holds on a rank."""
        for context in self.contexts[rank]:
            context.close()
        self.closed.add(rank)  # last: an interrupted release is done again

    def _resolver(self, context: int, rebuild: Rebuild | None) -> Callable[[Instance], None]:
        futures, free = self.futures, self.free

        def end(instance: Instance) -> None:
            future = futures[context]
            assert future is not None
            if not future.is_done:
                value = None if rebuild is None else rebuild(instance.outputs)
                resolve(future, value, None, instance.delivery)
            instance.outputs = ()
            instance.delivery = None
            futures[context] = None  # last: a future that is not done can always be found
            free.append(context)

        return end

    def _failer(self, context: int) -> Callable[[Poison], None]:
        def fail(poison: Poison) -> None:
            future = self.futures[context]
            assert future is not None
            resolve(future, None, poison)

        return fail
