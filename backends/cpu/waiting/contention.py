"""Tells by its yields whether a process shares its core with somebody who works.

The kernel lets such a one go on to the end of his time slice, unless the one who wants the core has
slept. To ranks that wait as well it gives way for microseconds only.
"""

from __future__ import annotations

from typing import Final

LONG: Final = 200e-6
"""Seconds after which a yield has not given way to a rank that waits."""

LASTS: Final = 0.05
"""Seconds for which a crowd is taken to be there after it was last seen."""

_WEIGHT: Final = 8
_ENOUGH: Final = 16
"""A long yield counts 8, and a short one takes 1 back. At 16 long ones are the rule. Those that
come now and then are not, such as where a hypervisor takes the core away for a while."""


class Crowd:
    """What the latest yields say."""

    __slots__ = ("_count", "_until")

    def __init__(self) -> None:
        self._count = 0
        self._until = 0.0

    def saw(self, began: float, ended: float) -> bool:
        """Note a yield, by when it began and ended, in seconds; whether there is a crowd."""
        if ended - began <= LONG:
            if self._count:
                self._count -= 1
            return False
        self._count = min(self._count + _WEIGHT, _ENOUGH)
        if self._count < _ENOUGH:
            return False
        self._until = ended + LASTS
        return True

    def is_over(self, now: float) -> bool:
        """Whether a crowd that was seen is there no longer."""
        return now > self._until
