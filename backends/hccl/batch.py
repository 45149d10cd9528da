"""Messages that are one operation: collected until all are there, then issued by one call."""

from __future__ import annotations

from typing import Any

from .abi import BYTES, RECEIVE, SEND, SendRecvItem
from .library import HcclLibrary


class Batch:
    """Stands for the library where a message is in a batch; see `Messenger`.

    Attributes:
        size: how many messages it has.
    """

    def __init__(self, library: HcclLibrary) -> None:
        self.size = 0
        self._library = library
        self._items: list[SendRecvItem] = []

    def send(self, pointer: int, nbytes: int, peer: int, comm: Any, stream: Any) -> None:
        """See `Messenger`."""
        self._add(SendRecvItem(SEND, pointer, nbytes, BYTES, peer), comm, stream)

    def recv(self, pointer: int, nbytes: int, peer: int, comm: Any, stream: Any) -> None:
        """See `Messenger`."""
        self._add(SendRecvItem(RECEIVE, pointer, nbytes, BYTES, peer), comm, stream)

    def forget(self) -> None:
        """Drop what has been collected, after a failed execution."""
        self._items.clear()

    def _add(self, item: SendRecvItem, comm: Any, stream: Any) -> None:
        self._items.append(item)
        if len(self._items) == self.size:
            items, self._items = self._items, []
            self._library.batch(items, comm, stream)
