"""Says where the executions in flight are, as far as one process knows."""

from __future__ import annotations

from collections.abc import Sequence

from .flight import FlightRecord
from .instance import Instance
from .resident import Resident


def positions_in_flight(residents: Sequence[Resident]) -> list[str]:
    """Where each execution in flight is, a line for each rank among `residents`.

    What other processes have come to is not known here, and is not said.
    """
    executions: dict[tuple[int, int], list[Instance]] = {}
    for resident in residents:
        for instance in resident.in_flight:
            if instance.running:
                key = (id(instance.module), instance.execution)
                executions.setdefault(key, []).append(instance)
    lines = []
    for instances in executions.values():
        first = instances[0]
        record = FlightRecord(first.module, [instance.position() for instance in instances])
        head = f"  @{first.module.name} {first.execution}"
        lines += [f"{head}: {line.strip()}" for line in record.describe().splitlines()]
    return lines
