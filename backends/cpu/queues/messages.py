"""Messages on their way out and in, and what carries them: the lanes.

A lane is one direction between two ranks (or from one to several of its machine) on one channel.
Its messages keep their order. Lanes never block: what cannot move yet is queued, and moves when
somebody calls `progress`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from ...failures.poison import Poison
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
        mark: what it is (`layout.py`), if it is not a value of the codec's.
        done: whether it has been written, so that the value may be changed.
    """

    __slots__ = ("codec", "done", "keeps", "mark", "nbytes", "prepared", "slot")

    def __init__(self, codec: Codec, slot: int | None = None) -> None:
        self.codec = codec
        self.slot = slot
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

    def write(self, slot: int, target: memoryview, at: int) -> None:
        """Write the message at byte `at` of `target`, the memory of `slot`."""
        if self.mark:
            target[at : at + self.nbytes] = self.prepared
        else:
            self.codec.write(self.prepared, target, at)

    def finish(self) -> None:
        """The message is out."""
        self.prepared = None
        self.done = True


class OutgoingTensor(Outgoing):
    """A tensor to be sent; keeps a view of each slot that it has been written to."""

    __slots__ = ("_codec", "_views")

    def __init__(self, codec: TensorCodec, slot: int | None = None) -> None:
        super().__init__(codec, slot)
        self._codec = codec
        self._views: dict[int, tuple[memoryview, Tensor]] = {}

    def write(self, slot: int, target: memoryview, at: int) -> None:
        """See `Outgoing`."""
        if self.mark:
            super().write(slot, target, at)
            return
        codec = self._codec
        if codec.is_large and codec.write_large(self.prepared, target, at):
            return
        cached = self._views.get(slot)
        if cached is None or cached[0] is not target:
            cached = self._views[slot] = (target, codec.view(target, at, 0, False))
        cached[1].copy_(self.prepared)


def outgoing(codec: Codec, slot: int | None = None) -> Outgoing:
    """A message to be sent, of the kind that suits the codec."""
    return OutgoingTensor(codec, slot) if isinstance(codec, TensorCodec) else Outgoing(codec, slot)


def plain(content: memoryview, mark: int) -> Any:
    """The object of a message that is bytes as they are, or a bare pickle."""
    return bytes(content) if mark & RAW else pickle.loads(content)


class Incoming:
    """One message to be received, used again for each execution.

    Attributes:
        codec: how its value is read.
        slot: the planned slot that carries it; None for the next of the ring.
        hold: whether the value stays in the lane's memory until it is released.
        into: a tensor to receive into, or None.
        at: where the lane expects it; the lane's own business.
        done: whether it has arrived.
        value: the value, once it has.
    """

    __slots__ = ("at", "codec", "done", "error", "hold", "into", "slot", "value")

    def __init__(self, codec: Codec, slot: int | None = None, hold: bool = False) -> None:
        self.codec = codec
        self.slot = slot
        self.hold = hold
        self.into: Tensor | None = None
        self.at: Any = None
        self.clear()

    def clear(self) -> None:
        """Be ready for the next message."""
        self.done = False
        self.value: Any = None
        self.error: Exception | None = None

    def arrive(
        self,
        slot: int,
        source: memoryview,
        at: int,
        nbytes: int,
        private: bool,
        mark: int = 0,
    ) -> None:
        """Read the message at byte `at` of `source`, the memory of `slot`.

        Args:
            private: whether the value may keep the memory of `source`.
            mark: what the message is (`layout.py`), if it is not a value of the codec's.
        """
        try:
            if mark & POISON:
                raise Poison.from_bytes(source[at : at + nbytes])
            if mark:
                self.value = plain(source[at : at + nbytes], mark)
            else:
                self.value = self.read(slot, source, at, nbytes, private)
        except Exception as error:  # raised again by `take`, where the executor can say whose it is
            self.error = error
        self.done = True

    def read(self, slot: int, source: memoryview, at: int, nbytes: int, private: bool) -> Any:
        """The value of the message."""
        return self.codec.view(source, at, nbytes, private)

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


class IncomingTensor(Incoming):
    """A tensor to be received; keeps a view of each slot that it has been read from."""

    __slots__ = ("_views",)

    def __init__(self, codec: TensorCodec, slot: int | None = None, hold: bool = False) -> None:
        super().__init__(codec, slot, hold)
        self._views: dict[int, tuple[memoryview, Tensor]] = {}

    def read(self, slot: int, source: memoryview, at: int, nbytes: int, private: bool) -> Tensor:
        """See `Incoming`."""
        view: Tensor
        if private:
            view = self.codec.view(source, at, nbytes, private)
        else:
            cached = self._views.get(slot)
            if cached is None or cached[0] is not source:
                view = self.codec.view(source, at, nbytes, private)
                cached = self._views[slot] = (source, view)
            view = cached[1]
        if self.into is not None:
            return self.into.copy_(view)
        if self.hold or private:
            return view
        return view.clone()


def incoming(codec: Codec, slot: int | None = None, hold: bool = False) -> Incoming:
    """A message to be received, of the kind that suits the codec."""
    if isinstance(codec, TensorCodec):
        return IncomingTensor(codec, slot, hold)
    return Incoming(codec, slot, hold)


class SendLane(Protocol):
    """The sender's side of a lane."""

    def push(self, message: Outgoing) -> None:
        """Send a loaded message, after all those pushed before."""

    def progress(self) -> None:
        """Move on what is queued."""


class ReceiveLane(Protocol):
    """The receiver's side of a lane."""

    def post(self, message: Incoming) -> None:
        """Receive the next message into `message`."""

    def progress(self) -> None:
        """Note what has arrived."""

    def release(self, message: Incoming) -> None:
        """Give back the memory of a message that was held."""


Active = dict[Any, None]
"""The lanes that need `progress`, in the order in which they came to need it."""


def mover(active: Active) -> Callable[[], None]:
    """What moves those lanes on that are in `active` when it is called."""

    def progress() -> None:
        if active:
            for lane in tuple(active):
                lane.progress()

    return progress
