"""Python's collector of cycles rests while a step is traced."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let the collector rest inside the `with` block.

    Nearly all objects that a trace makes belong to its graphs and stay, as do those that torch's
    modules make when they are imported. The collector would look at each of them again and again,
    for a fifth of the time of a trace. What has been made meanwhile then counts as old at once,
    unless the user has frozen objects, which would be thawed.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if gc.get_freeze_count() == 0:
                gc.freeze()
                gc.unfreeze()
            gc.enable()
