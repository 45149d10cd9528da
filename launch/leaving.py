"""Says which method ends a rank that serves: its exit code alone tells nobody."""

from __future__ import annotations

from collections.abc import Iterable

from ..backends.errors import Failure
from ..backends.resident import Resident
from ..tracer.source import traceback_location


def why_it_leaves(error: SystemExit, residents: Iterable[Resident]) -> str:
    """A line that names the method which has raised `error` while its rank served, and where."""
    failure = _failure(error, residents)
    line = traceback_location(error.__traceback__)
    at = "" if line is None else f" at {line}"
    leaves = f"{at}: this rank leaves serve(), and the job ends"
    exits = f"SystemExit({', '.join(map(repr, error.args))})"
    if failure is None:
        return exits + leaves
    return (
        f"{exits} in {failure.actor}.{failure.method}{leaves}. To tell the caller of an execution "
        "that it has failed, raise an Exception"
    )


def _failure(error: SystemExit, residents: Iterable[Resident]) -> Failure | None:
    """What is known of the call; None if it was in none, or its execution had failed before."""
    for resident in residents:
        for instance in resident.in_flight:
            if instance.poison is not None and instance.poison.original is error:
                return instance.poison.failure
    return None
