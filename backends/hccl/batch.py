"""Messages that are one operation: collected until all are there, then issued by one call."""

from __future__ import annotations

from typing import Any

from .abi import BYTES, RECEIVE, SEND, SendRecvItem
from .library import HcclLibrary


class Batch:
    """A `Messenger` for the messages of a batch, in place of the library.

    Attributes:
        size: the number of its messages.
    """

    def __init__(self, library: HcclLibrary) -> None:
        self.size = 0
        self._library = library
        self._items: list[SendRecvItem] = []

    def send(self, pointer: int, nbytes: int, peer: int, comm: Any, stream: Any) -> None:
        """Add a send of bytes to member `peer`."""
        self._add(SendRecvItem(SEND, pointer, nbytes, BYTES, peer), comm, stream)

    def recv(self, pointer: int, nbytes: int, peer: int, comm: Any, stream: Any) -> None:
        """Add a receive of bytes from member `peer`."""
        self._add(SendRecvItem(RECEIVE, pointer, nbytes, BYTES, peer), comm, stream)

    def forget(self) -> None:
        """Drop the messages that have been collected, after a failed execution."""
        self._items.clear()

    def _add(self, item: SendRecvItem, comm: Any, stream: Any) -> None:
        self._items.append(item)
        if len(self._items) == self.size:
            items, self._items = self._items, []
            self._library.batch(items, comm, stream)
