"""Watches a device: an execution that does not end, or a fault of its messages, ends the job.

The host puts work on streams and goes on, so it does not notice a message that never comes; and
when it waits for the device at last, in a method or in the caller's program, nobody is left to look
at a clock. A thread does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic

from ...ir.attributes import Stream
from .base import Device, Event

INTERVAL = 0.25
"""Seconds between two looks."""


class Watchdog:
    """Watches one program's executions on its device.

    Args:
        device: of this rank.
        timeout: seconds that an execution may take on the device; None for no limit.
        faults: says what has gone wrong with messages under way; called by the thread.
        bark: called once, by the thread, with what is wrong.
    """

    def __init__(
        self,
        device: Device,
        timeout: float | None,
        faults: Callable[[], Sequence[str]],
        bark: Callable[[str], None],
    ) -> None:
        self._compute = device.stream(Stream.COMPUTE)
        self._event: Event = device.event()
        self._timeout = timeout
        self._faults = faults
        self._bark = bark
        self._watched: tuple[int, float] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cg watchdog", daemon=True)
        self._thread.start()

    def watch(self, execution: int) -> None:
        """An execution has been put on the device as a whole.

        While an earlier one is not over, there is nothing to add: this one is behind it.
        """
        if self._watched is None:
            self._event.record(self._compute)
            self._watched = (execution, monotonic())

    def close(self) -> None:
        """Stop watching; idempotent."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            trouble = self._look()
            if trouble is not None:
                self._bark(trouble)
                return

    def _look(self) -> str | None:
        faults = self._faults()
        if faults:
            return "messages between devices have failed: " + "; ".join(faults)
        if self._watched is None:
            return None
        execution, since = self._watched
        if self._event.query():
            self._watched = None
            return None
        if self._timeout is not None and monotonic() - since > self._timeout:
            return (
                f"execution {execution} has been put on the device, which has not ended it after "
                f"{self._timeout:g} s"
            )
        return None
