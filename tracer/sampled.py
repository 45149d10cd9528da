"""Choose the calls to look at, where a look at each of them would cost too much."""

from __future__ import annotations

from typing import Final

SELDOM: Final = 512
"""The most calls from one look to the next."""


def until_next(number: int) -> int:
    """The number of calls from call `number` to the next one to look at; calls count from 0.

    These are the first three calls, then each whose number is a power of two, then every 512th.
    Ranks that count the same calls look at the same ones.
    """
    return 1 if number < 2 else min(number, SELDOM)
