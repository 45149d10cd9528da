"""Start the executions of a world over after an interruption that leaves them in doubt.

A signal's handler may raise between any two calls of this package. If it cuts the sending of a
message or a command in two, nobody can say how far that has come. So all ranks give up their
executions in flight, and bring the transports of commands and messages back to their beginning.
They do so in epochs. Each epoch can be begun again at any point: its work may be done twice, and
one store says that it is done.
"""

from __future__ import annotations

import enum
from typing import Final, Protocol

from ..errors import ExecutionLost, Failure, TransportError, type_name
from ..poison import Poison
from .graphs import DrivenGraph
from .outcomes import resolve


class RestartState(enum.IntEnum):
    """The state of a restart; ranks share counts of epochs, three for each restart."""

    RUNNING = 0
    STOPPED = 1
    RESET = 2


RESTART_STATES: Final = len(RestartState)


class RestartEpochs(Protocol):
    """The restart epochs that ranks have gone through in starting over."""

    @property
    def mine(self) -> int:
        """The number of epochs that this process has gone through."""

    def reach(self, epoch: int) -> None:
        """Say that this process has gone through `epoch` epochs; its earlier stores are visible."""

    def missing(self, epoch: int) -> list[int]:
        """The ranks that have gone through fewer; they are woken."""

    def is_wanted(self, driver: int) -> bool:
        """True if the driver, or for the driver another rank, has begun to start over."""

    def tell(self, number: int) -> None:
        """As the driver, before it reaches an epoch: tell the number of the next execution."""

    def told(self, driver: int) -> int:
        """The number that the driver has told."""


def cannot_start_over(why: str) -> TransportError:
    """The error of every call after an interruption, where ranks cannot start over."""
    return TransportError(
        f"this process was interrupted ({why}) while it moved executions on, and nobody can say "
        "how far their messages have come. Graphs that span machines, devices, or transports of "
        "one's own cannot start over: start the job again"
    )


def give_up(graph: DrivenGraph, why: str) -> None:
    """Forget the executions of a graph in this process; futures that are not done fail."""
    for index, future in enumerate(graph.futures):
        if future is not None and not future.is_done:
            resolve(future, None, _lost(graph, why))
        graph.futures[index] = None
    graph.free[:] = reversed(range(len(graph.futures)))
    for rank, contexts in graph.contexts.items():
        for context in contexts if rank not in graph.closed else ():
            for instance in context.instances:
                instance.abandon()


def reset(graph: DrivenGraph) -> None:
    """Forget the messages of a graph on the ranks of this process."""
    for rank, contexts in graph.contexts.items():
        for context in contexts if rank not in graph.closed else ():
            if context.reset is not None:
                context.reset()


def _lost(graph: DrivenGraph, why: str) -> Poison:
    error = ExecutionLost(
        f"rank {graph.driver} was interrupted ({why}) while it moved executions on, so those in "
        "flight were given up. What their methods had done by then stays done; the graph can be "
        "used on"
    )
    failure = Failure(type_name(error), str(error), graph.driver, f"@{graph.name}")
    return Poison(failure, error)
