"""Detect CPU contention from sched_yield latency.

A process that works keeps its core to the end of its time slice, unless the process that wants the
core has slept. Ranks that wait give way within microseconds. So a yield that takes long has let
somebody work, and a rank that sleeps instead gets the core sooner.
"""

from __future__ import annotations

from typing import Final

LONG: Final = 1e-3
"""A yield that takes more seconds than this has given way to a process that used up its time slice,
which is 3 to 4 ms on Linux. Ranks that wait return within microseconds. A thread that copies a
share of a large message returns within half a millisecond, and sleeping would cost more."""

NEAR: Final = 0.02
"""Seconds within which two long yields show contention, whatever short ones are between them: ranks
that wait on the same core give way to each other hundreds of times meanwhile. Long yields farther
apart come from a hypervisor, which takes the core away for a while."""

SHORTEST: Final = 0.05
LONGEST: Final = 0.8
"""Seconds for which contention is taken to last, at least and at most. They double each time that
the first yields afterwards are long again, because each such check costs a long yield."""


class Contention:
    """The state of the core, by the latest yields.

    Attributes:
        until: when contention that was seen is taken to end.
    """

    __slots__ = ("_lasts", "_long_at", "until")

    def __init__(self) -> None:
        self._lasts = SHORTEST
        self._long_at = -1.0
        self.until = -1.0

    def note(self, began: float, ended: float) -> bool:
        """Note a yield, by its begin and end in seconds; return whether there is contention.

        A yield that took no longer than `LONG` says nothing, so callers may leave it out.
        """
        if ended - began <= LONG:
            return False
        lasts_on = began - self.until <= NEAR
        is_near = began - self._long_at <= NEAR
        self._long_at = ended
        if not (lasts_on or is_near):
            return False
        self._lasts = min(2 * self._lasts, LONGEST) if lasts_on else SHORTEST
        self.until = ended + self._lasts
        return True

    def is_on(self, now: float) -> bool:
        """Return whether contention was seen, and is taken to last until now."""
        return now <= self.until
