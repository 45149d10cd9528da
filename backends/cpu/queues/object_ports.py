"""The ports of objects between two processes of one machine, made for small ones.

Numbers and text go as a bare pickle, bytes as they are, straight into the next slot of the ring;
all else goes as every message does (`ports.py`). The slot's header says which of these it was.
"""

from __future__ import annotations

import pickle
from typing import Any

from ...poison import Poison
from ..memory.codecs import ObjectCodec
from ..memory.layout import FULL, IN_HEADER, INLINE, PICKLE, POISON, RAW, SIZE_MASK
from ..memory.objects import decode
from .local_receiver import LocalReceiver
from .local_sender import LocalSender
from .messages import Outgoing, read_marked
from .ports import InPlaceRecvPort, SendPort

_NUMBERS_AND_TEXT = frozenset({str, int, float, bool, type(None)})


def small(value: Any) -> tuple[bytes | None, int]:
    """The bytes of an object that goes straight into a slot, and their mark; None for others."""
    kind = type(value)
    if kind is bytes:
        return value, RAW
    if kind in _NUMBERS_AND_TEXT:
        return pickle.dumps(value, 5), PICKLE
    return None, 0


class ObjectSendPort(SendPort):
    """Sends one object; done when it may be changed."""

    __slots__ = ("_local",)

    def __init__(self, queue: LocalSender) -> None:
        super().__init__(queue, Outgoing(ObjectCodec(queue.node.copier)))
        self._local = queue

    def start(self, value: Any) -> None:
        content, mark = small(value)
        message, queue = self._message, self._local
        if content is None:
            message.load(value)
        elif queue.send_small(content, mark):
            message.done = True  # an execution that was given up may have left it false
            return
        else:
            message.load_raw(content, mark)
        queue.send(message)


class ObjectRecvPort(InPlaceRecvPort):
    """Receives one object, in a slot that is known when the receive is posted.

    The object stays in its slot until it is taken, or until the queue needs the ring for later
    messages, and calls `keep`.
    """

    __slots__ = ("_get", "_kept", "_last_full", "_last_number", "_memory", "_payload", "_room")

    needs_release = False

    def __init__(self, queue: LocalReceiver) -> None:
        super().__init__(queue)
        self._memory, self._room = queue.memory, queue.ring_room
        self._get = queue.read
        self._payload = self._last_full = self._last_number = 0
        self._kept: tuple[Any] | Exception | None = None  # the object, or what `take` is to raise

    def start(self, value: Any) -> None:
        number, place = self._queue.post_in_ring(self)
        self._number = number
        self._slot, self._full, self._nbytes, self._consumed, self._payload = place[:5]
        self._last_full, self._last_number = place[5], number + place[6]
        self._kept = None

    def fail(self, poison: Poison) -> None:
        self.start(None)

    def poll(self) -> bool:
        if self._words[self._full] < self._number:
            self._queue.make_room()
            return False
        if self._order is not None:
            self._order()
        return True

    def keep(self) -> bool:
        """Move the object out of its slot, if it has arrived; return whether it has."""
        if not super().poll():
            return False
        try:
            self._kept = (self._read(),)
        except Exception as error:  # `take` raises it, where the engine knows the op
            self._kept = error
        return True

    def peek_error(self) -> Poison | None:
        if self._kept is not None:
            return self._kept if isinstance(self._kept, Poison) else None
        return super().peek_error()

    def take(self) -> Any:
        outcome, self._kept = self._kept, None
        if outcome is None:
            self._queue.in_ring.remove(self)
            return self._read()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome[0]

    def _read(self) -> Any:
        """Read the object from its slot, which may be overwritten after that.

        Raises:
            Poison: it is an error.
            Exception: it cannot be unpickled.
        """
        size = self._words[self._nbytes]
        nbytes = size & SIZE_MASK
        memory, at, private = self._memory, self._payload, False
        try:
            if nbytes > self._room:
                memory, at, private = self._queue.find(self._slot, size)
            elif size & (PICKLE | RAW):
                if size & INLINE:
                    at = 8 * (self._full - FULL + IN_HEADER)
                content = self._get(at, nbytes)
                return content if size & RAW else pickle.loads(content)
            if size & (RAW | PICKLE | POISON):
                return read_marked(memory[at : at + nbytes], size)
            return decode(memory, at, nbytes, private)
        finally:
            words = self._words
            if words[self._last_full] >= self._last_number or self._order is not None:
                self._queue.consume(self._consumed, self._number)
            else:
                # The ring is not full, so its sender does not wait for this slot. A sender looks
                # hundreds of times before it sleeps, so nothing needs to be ordered either.
                words[self._consumed] = self._number

    def release(self) -> None:
        """Return: what is taken is the receiver's own."""
