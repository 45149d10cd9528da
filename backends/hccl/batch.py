"""Messages that are one operation: collected until all are there, then issued by one call."""

from __future__ import annotations

from typing import Any

from ..streams.library import Library, RawMessage


class Batch:
    """The `Messenger` of a batch, which collects its messages in place of the library.

    Attributes:
        size: the number of its messages.
    """

    def __init__(self, library: Library) -> None:
        self.size = 0
        self._library = library
        self._messages: list[RawMessage] = []

    def send(self, pointer: int, nbytes: int, peer: int, comm: Any, stream: Any) -> None:
        """Add a send of bytes to member `peer`."""
        self._add(RawMessage(False, peer, pointer, nbytes), comm, stream)

    def recv(self, pointer: int, nbytes: int, peer: int, comm: Any, stream: Any) -> None:
        """Add a receive of bytes from member `peer`."""
        self._add(RawMessage(True, peer, pointer, nbytes), comm, stream)

    def forget(self) -> None:
        """Drop the messages that have been collected, after a failed execution."""
        self._messages.clear()

    def _add(self, message: RawMessage, comm: Any, stream: Any) -> None:
        self._messages.append(message)
        if len(self._messages) == self.size:
            messages, self._messages = self._messages, []
            self._library.batch(messages, comm, stream)
