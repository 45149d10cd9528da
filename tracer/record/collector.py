"""Pause Python's garbage collector while a step is traced or compiled."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MANY = 30_000
"""The number of new objects above which counting the user's frozen objects is worth it."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector inside the `with` block.

    Nearly all objects that a trace makes belong to its graphs and stay, as do programs, and the
    objects that torch's modules make when they are imported. The collector would visit them again
    and again, for a fifth of the time of a trace. After many objects, all are moved to the oldest
    generation by a freeze and a thaw. This is left out if the user has frozen objects, which
    would be thawed as well, and after few: counting a million frozen objects takes 30 ms.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if gc.get_count()[0] > _MANY and gc.get_freeze_count() == 0:
                gc.freeze()
                gc.unfreeze()
            gc.enable()
