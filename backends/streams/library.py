"""The few calls of a collective communication library that the ports need, behind one protocol.

All arguments are numbers: pointers, counts, element types, reductions. A library whose operations
complete on streams, and pair in order, only has to implement `Library`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ..errors import TransportError


class CommunicationError(TransportError):
    """A library for messages between devices has reported an error, or is not ready in time."""

    __module__ = "cg"  # the public name, which tracebacks show


class RawMessage(NamedTuple):
    """One message of a batch: bytes at a pointer, for member `peer` or from it."""

    receives: bool
    peer: int
    pointer: int
    nbytes: int


def batch_in_words(messages: Sequence[RawMessage]) -> str:
    """The messages of a batch, for errors."""
    peers = sorted({message.peer for message in messages})
    whom = f"member{'s' if len(peers) > 1 else ''} {', '.join(map(str, peers))}"
    return f"{len(messages)} messages with {whom}"


class Messenger(Protocol):
    """Sends and receives bytes."""

    def send(self, pointer: int, nbytes: int, peer: int, comm: Any, stream: Any) -> None:
        """Send bytes to member `peer`."""

    def recv(self, pointer: int, nbytes: int, peer: int, comm: Any, stream: Any) -> None:
        """Receive bytes from member `peer`."""


class Library(Messenger, Protocol):
    """A collective communication library. Every call may raise `CommunicationError`.

    A communicator is what `connect` returns. Its calls are made by one thread, except for `error`,
    which others call at any time until the communicator is given up. A stream is given as
    `Pool.handle` gives it; element types and reductions are the library's own numbers.

    Attributes:
        name: in messages.
    """

    name: str

    def version(self) -> str:
        """The version of the library itself."""

    def unique_id(self) -> bytes:
        """Make the key that the members of a new communicator share; one of them calls this."""

    def connect(self, size: int, unique: bytes, rank: int) -> Any:
        """Begin to join a new communicator, as member `rank`; all its members do."""

    def is_ready(self, comm: Any) -> bool:
        """True once a communicator has been joined."""

    def all_reduce(
        self, source: int, target: int, count: int, type_: int, op: int, comm: Any, stream: Any
    ) -> None:
        """Reduce `count` elements; each member gets the result."""

    def reduce_scatter(
        self, source: int, target: int, count: int, type_: int, op: int, comm: Any, stream: Any
    ) -> None:
        """Reduce; each member gets its part, of `count` elements."""

    def all_gather(self, source: int, target: int, nbytes: int, comm: Any, stream: Any) -> None:
        """Give each member the `nbytes` bytes of all, in their order."""

    def broadcast(
        self, source: int, target: int, nbytes: int, root: int, comm: Any, stream: Any
    ) -> None:
        """Give each member the bytes of member `root`."""

    def batch(self, messages: Sequence[RawMessage], comm: Any, stream: Any) -> None:
        """Send and receive messages as one operation, in which none waits for another."""

    def error(self, comm: Any) -> str | None:
        """The failure of a communicator, in words; None if there is none."""

    def abort(self, comm: Any) -> None:
        """Break off the operations under way, and give the communicator up."""

    def destroy(self, comm: Any) -> None:
        """Give up a communicator without operations under way."""
