"""Messages on their way out and in, and the queues that carry them.

A queue is one direction between two ranks (or from one to several of its machine) on one channel.
Its messages keep their order. Queues never block: what cannot move yet waits in them, and moves
when somebody calls `progress`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from ...poison import Poison
from ..memory.codecs import Codec, TensorCodec
from ..memory.layout import POISON, RAW


class Outgoing:
    """One message to be sent, used again for each execution.

    Attributes:
        codec: how its value is written.
        slot: the planned slot that carries it; None for the next of the ring.
        prepared: what is to be written.
        nbytes: bytes of the message.
        keeps: whether the value may change before the message is done, so that what cannot be sent
            at once is copied.
        mark: its mark (`memory/layout.py`); 0 if it is a value of the codec.
        done: whether it has been written, so that the value may be changed.
        is_held: whether receivers only hold the value in place until they are done, and keep
            nothing.
    """

    __slots__ = ("codec", "done", "is_held", "keeps", "mark", "nbytes", "prepared", "slot")

    def __init__(self, codec: Codec, slot: int | None = None, is_held: bool = False) -> None:
        self.codec = codec
        self.slot = slot
        self.is_held = is_held
        self.prepared: Any = None
        self.nbytes = 0
        self.keeps = False
        self.mark = 0
        self.done = False

    def keep(self) -> None:
        """Copy what has not been sent, if it may change."""
        if self.keeps and not self.mark:
            self.prepared = self.codec.keep(self.prepared)

    def load(self, value: Any) -> None:
        """Take the value to be sent.

        Raises:
            TransportError: it is not of the message's type, or cannot be pickled.
        """
        self.done = False
        self.mark = 0
        self.prepared, self.nbytes = self.codec.prepare(value)

    def fail(self, poison: Poison) -> None:
        """Take an error to be sent in place of the value."""
        self.load_raw(poison.to_bytes(), POISON)

    def load_raw(self, content: bytes, mark: int) -> None:
        """Take bytes to be sent as they are."""
        self.done = False
        self.mark = mark
        self.prepared = content
        self.nbytes = len(content)

    def write(self, target: memoryview, at: int) -> None:
        """Write the message at byte `at` of `target`."""
        if self.mark:
            target[at : at + self.nbytes] = self.prepared
        else:
            self.codec.write(self.prepared, target, at)

    def finish(self) -> None:
        """Keep in mind that the message is out."""
        self.prepared = None
        self.done = True


def read_marked(content: memoryview, mark: int) -> Any:
    """The object of a marked message: bytes as they are, or a bare pickle.

    Raises:
        Poison: the message is an error.
    """
    if mark & POISON:
        raise Poison.from_bytes(content)
    return bytes(content) if mark & RAW else pickle.loads(content)


class Incoming:
    """One message to be received, used again for each execution.

    Attributes:
        codec: how its value is read.
        slot: the planned slot that carries it; None for the next of the ring.
        hold: whether the value stays in the queue's memory until it is released.
        into: a tensor to receive into, or None.
        at: the slot in which a queue inside a machine expects it, and its number there.
        done: whether it has arrived.
        value: the value, once it has.
        error: what to raise in its place.
    """

    __slots__ = ("_copies", "at", "codec", "done", "error", "hold", "into", "slot", "value")

    def __init__(self, codec: Codec, slot: int | None = None, hold: bool = False) -> None:
        self.codec = codec
        self.slot = slot
        self.hold = hold
        self.into: Tensor | None = None
        self.at = (0, 0)
        self._copies = isinstance(codec, TensorCodec) and not hold
        self.clear()

    def clear(self) -> None:
        """Be ready for the next message."""
        self.done = False
        self.value: Any = None
        self.error: Exception | None = None

    def arrive(
        self, source: memoryview, at: int, nbytes: int, private: bool, mark: int = 0
    ) -> None:
        """Read the message at byte `at` of `source`.

        Args:
            private: whether the value may keep the memory of `source`.
            mark: its mark (`memory/layout.py`); 0 if it is a value of the codec.
        """
        try:
            if mark:
                self.value = read_marked(source[at : at + nbytes], mark)
            else:
                value = self.codec.view(source, at, nbytes, private)
                if self.into is not None:
                    value = self.into.copy_(value)
                elif self._copies and not private:
                    value = value.clone()
                self.value = value
        except Exception as error:  # `take` raises it, where the engine knows the op
            self.error = error
        self.done = True

    def take(self) -> Any:
        """The value.

        Raises:
            TransportError: it could not be read.
            Poison: its sender has sent an error instead.
        """
        if self.error is not None:
            raise self.error
        value, self.value = self.value, None
        return value


class SendQueue(Protocol):
    """The sender's side of a queue."""

    def send(self, message: Outgoing) -> None:
        """Send a loaded message, after all those before it."""

    def progress(self) -> None:
        """Move on what waits."""


class RecvQueue(Protocol):
    """The receiver's side of a queue."""

    def post(self, message: Incoming) -> None:
        """Receive the next message into `message`."""

    def progress(self) -> None:
        """Note what has arrived."""

    def release(self, message: Incoming) -> None:
        """Give back the memory of a message that was held."""


Active = dict[Any, None]
"""The queues that need `progress`, in the order in which they came to need it."""


def mover(active: Active) -> Callable[[], None]:
    """Make a function that moves on the queues that are in `active` at each call."""

    def progress() -> None:
        if active:
            for queue in tuple(active):
                queue.progress()

    return progress
