"""Python's collector of cycles rests while a step is traced."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MANY = 200_000
"""Objects of a trace that are worth the time of counting those that the user has frozen."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let the collector rest inside the `with` block.

    Nearly all objects that a trace makes belong to its graphs and stay, as do those that torch's
    modules make when they are imported. The collector would look at each of them again and again,
    for a fifth of the time of a trace. What a large trace has made then counts as old at once,
    unless the user has frozen objects, which would be thawed. A small one leaves its objects to the
    collector: to count a million frozen ones takes 30 ms.
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
