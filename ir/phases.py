"""The phases of a module: how far it has been compiled."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """The progress of a module's compilation; each op class declares which phases admit it.

    A TRACED module is the step as the user wrote it. A PLACED one has gradients, and a `transfer`
    wherever a value crosses places. An ASYNC one has futures instead of transfers. A SCHEDULED one
    has a linear program for each rank; before that, a module has one program over all ranks.
    """

    TRACED = "traced"
    PLACED = "placed"
    ASYNC = "async"
    SCHEDULED = "scheduled"

    def __str__(self) -> str:
        return self.value


def has_futures(phase: Phase) -> bool:
    """True if communication is asynchronous in this phase, so that its results are futures."""
    return phase in (Phase.ASYNC, Phase.SCHEDULED)


def has_places(phase: Phase) -> bool:
    """True if types say where a value is; in a scheduled program it is at the program's rank."""
    return phase is not Phase.SCHEDULED
