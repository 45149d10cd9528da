"""Read timeouts, and describe the executions in flight when one has passed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

from ..failures.flight import FlightRecord
from .graphs import DrivenGraph
from .instance import Instance
from .rank_scheduler import RankScheduler


def seconds(timeout: object) -> float | None:
    """A timeout as a number of seconds; None if it is infinite.

    Raises:
        TypeError: it is no number.
        ValueError: it is nan.
    """
    if not isinstance(timeout, Real):
        kind = type(timeout).__name__
        raise TypeError(f"timeout={timeout!r} is a {kind}: give a number of seconds, or None")
    value = float(timeout)
    if math.isnan(value):
        raise ValueError("timeout=nan: give a number of seconds, or None to wait without a limit")
    return None if value == math.inf else value


def is_full(graph: DrivenGraph) -> str:
    """The message that a graph has no free execution context."""
    return (
        f"{graph.in_flight} executions of '{graph.name}' are in flight, as many as it was compiled "
        "for"
    )


def late_start(graph: DrivenGraph) -> str:
    """The message that an execution waited too long for a free context, and what to do."""
    return (
        f"execution {graph.count} has not started after {graph.patience:g} s, for "
        f"{is_full(graph)}. It was not sent: call execute again when one has ended, or compile the "
        "step with a larger max_inflight or timeout"
    )


def late_end(graph: DrivenGraph) -> str:
    """The message that a graph's executions do not end, so that it cannot be closed."""
    return (
        f"'{graph.name}' has not been closed: executions of it are in flight ({graph.in_flight}), "
        f"and none has moved on rank {graph.driver} for {graph.limit:g} s. Look at what is slow or "
        "stuck on the ranks below; where they only need longer, raise compile(timeout=...) or "
        "CG_TIMEOUT"
    )


def late_restart(graph: DrivenGraph) -> str:
    """The message that ranks do not start over after an interruption, and what to do."""
    return (
        f"execution {graph.count} of '{graph.name}' has not started after {graph.limit:g} s, for "
        "after an interruption all ranks start over, as soon as each comes out of its method. It "
        "was not sent: call execute again later"
    )


def records_in_flight(schedulers: Sequence[RankScheduler]) -> list[FlightRecord]:
    """The flight records of executions in flight on the ranks of `schedulers`."""
    executions: dict[tuple[int, int], list[Instance]] = {}
    for scheduler in schedulers:
        for instance in scheduler.in_flight:
            if instance.running:
                key = (id(instance.module), instance.execution)
                executions.setdefault(key, []).append(instance)
    return [
        FlightRecord(
            first.module,
            [instance.position() for instance in instances],
            label=f"@{first.module.name} {first.execution}: ",
        )
        for instances in executions.values()
        for first in instances[:1]
    ]
