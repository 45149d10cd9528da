"""The phases of a module: how far it has been compiled."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """The progress of a module's compilation; each op class says which phases admit it.

    TRACED is what the user wrote. PLACED has gradients, and a `transfer` wherever a value
    crosses places. ASYNC has futures instead of transfers. SCHEDULED has one linear program for
    each rank; before it there is one program over all ranks.
    """

    TRACED = "traced"
    PLACED = "placed"
    ASYNC = "async"
    SCHEDULED = "scheduled"

    def __str__(self) -> str:
        return self.value


def has_futures(phase: Phase) -> bool:
    """True if communication is asynchronous in this phase: its results are futures."""
    return phase in (Phase.ASYNC, Phase.SCHEDULED)


def has_places(phase: Phase) -> bool:
    """True if types say where a value is; a scheduled program implies it."""
    return phase is not Phase.SCHEDULED
