"""Count executions: the part of the statistics that every execution goes through.

`Tally` is compiled, and `Statistics`, which extends it, is not, as users inspect its signatures.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from ..compiling import mypyc_attr

RECENT: Final = 256
"""The number of executions that medians are taken over."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Tally:
    """Number and times of executions, as in `Statistics`."""

    def __init__(self) -> None:
        self.executions = 0
        self.failures = 0
        self.total = 0.0
        self.blocked = 0.0
        self.recent: deque[tuple[float, float]] = deque(maxlen=RECENT)


def count(tally: Tally, total: float, blocked: float) -> None:
    """Count one execution.

    This is no method, because a method that a subclass may replace is looked up at each call.
    """
    tally.executions += 1
    tally.total += total
    tally.blocked += blocked
    tally.recent.append((total, blocked))
