"""Lines of the log while something takes long."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

log = logging.getLogger("serve")

SAYING = 10.0
"""The most seconds between two lines of the log while the engine is prepared."""


@contextmanager
def said(doing: str, here: bool = True, every: float = SAYING) -> Iterator[None]:
    """Say what is done inside of the `with` block, and again while it goes on.

    The later lines come from a thread of their own, since the block may hold the only other one.

    Args:
        doing: what is done.
        here: whether this rank says it.
        every: seconds between lines.
    """
    if not here:
        yield
        return
    began, ended = monotonic(), threading.Event()
    log.info("%s", doing)

    def repeat() -> None:
        while not ended.wait(every):
            log.info("still %s, for %.0f s", doing, monotonic() - began)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
