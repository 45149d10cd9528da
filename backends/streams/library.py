"""The few calls of a collective communication library that the ports need, behind one protocol.

Everything is a number: pointers, counts, element types, reductions. A library whose operations
complete on streams, and pair in order, needs no more than to implement `Library`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..errors import TransportError


class CommunicationError(TransportError):
    """The library has reported an error, or does not get ready."""


class Messenger(Protocol):
    """What sends and receives bytes."""

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
        """Of the library itself."""

    def unique_id(self) -> bytes:
        """What the members of a new communicator have in common; one of them makes it."""

    def connect(self, size: int, unique: bytes, rank: int, width: int | None = None) -> Any:
        """Begin to join a new communicator; all its members do.

        Args:
            rank: this member's number in it.
            width: how many of the device's multiprocessors its operations may occupy, where the
                library can be told so.
        """

    def is_ready(self, comm: Any) -> bool:
        """Whether a communicator has been joined."""

    def all_reduce(
        self, source: int, target: int, count: int, type_: int, op: int, comm: Any, stream: Any
    ) -> None:
        """Reduce `count` elements; each member gets the result."""

    def reduce_scatter(
        self, source: int, target: int, count: int, type_: int, op: int, comm: Any, stream: Any
    ) -> None:
        """Reduce; each member gets its part, of `count` elements."""

    def all_gather(self, source: int, target: int, nbytes: int, comm: Any, stream: Any) -> None:
        """Each member gets the `nbytes` bytes of all, in their order."""

    def broadcast(
        self, source: int, target: int, nbytes: int, root: int, comm: Any, stream: Any
    ) -> None:
        """Each member gets the bytes of member `root`."""

    def exchange(
        self, messages: Sequence[tuple[int, int, int, int]], comm: Any, stream: Any
    ) -> None:
        """Send to and receive from several members at once.

        Args:
            messages: for each member its number, the pointers to what it gets and to what comes
                from it, and the bytes of each.
        """

    def error(self, comm: Any) -> str | None:
        """What has gone wrong with a communicator since, if anything has."""

    def abort(self, comm: Any) -> None:
        """Break off what is under way, and give the communicator up."""

    def destroy(self, comm: Any) -> None:
        """Give a communicator up that has nothing under way."""
