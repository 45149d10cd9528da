"""Calls that are looked at, where a look at each of them would cost too much."""

from __future__ import annotations

from typing import Final

SELDOM: Final = 512
"""The most calls from one look to the next."""


def until_next(number: int) -> int:
    """How many calls after call `number` the next look is; numbers begin with 0.

    The first three calls are looked at, then each whose number is a power of two, then every
    512th. What ranks count alike, they look at alike.
    """
    return 1 if number < 2 else min(number, SELDOM)
