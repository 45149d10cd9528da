"""The ports of objects between two processes of one machine, made for small ones.

Numbers and text go as a bare pickle, bytes as they are, straight into the next slot of the ring;
all else takes the way of every message (`ports.py`). The slot's header says which of these it was.
"""

from __future__ import annotations

import pickle
from typing import Any

from ...failures.poison import Poison
from ..memory.codecs import ObjectCodec
from ..memory.layout import FULL, IN_HEADER, INLINE, PICKLE, POISON, RAW, SIZE_MASK
from ..memory.objects import decode
from .local import LocalReceiver, LocalSender
from .messages import Outgoing

_NUMBERS_AND_TEXT = frozenset({str, int, float, bool, type(None)})


def small(value: Any) -> tuple[bytes | None, int]:
    """The bytes of an object that goes straight into a slot, and what they are; None for others."""
    kind = type(value)
    if kind is bytes:
        return value, RAW
    if kind in _NUMBERS_AND_TEXT:
        return pickle.dumps(value, 5), PICKLE
    return None, 0


class ObjectSendPort:
    """Sends one object; done when it may be changed."""

    __slots__ = ("_lane", "_message")

    holds = False

    def __init__(self, lane: LocalSender) -> None:
        self._lane = lane
        self._message = Outgoing(ObjectCodec(lane.node.copier))
        self._message.done = True

    def own(self) -> None:
        """See `Port`."""
        self._message.keeps = True

    def start(self, value: Any) -> None:
        """See `Port`."""
        content, mark = small(value)
        message = self._message
        if content is None:
            message.load(value)
        elif self._lane.put(content, mark):
            message.done = True  # an execution that was given up may have left another one
            return
        else:
            message.load_raw(content, mark)
        self._lane.push(message)

    def fail(self, poison: Poison) -> None:
        """See `Port`."""
        self._message.fail(poison)
        self._lane.push(self._message)

    def poll(self) -> bool:
        """See `Port`."""
        if not self._message.done:
            self._lane.progress()
        return self._message.done

    def take(self) -> None:
        """See `Port`."""

    def release(self) -> None:
        """See `Port`."""


class ObjectRecvPort:
    """Receives one object. Its slot is known when it is asked for.

    The object stays in its slot until it is taken, or until the lane needs the ring for what comes
    behind it, and asks for it to be kept elsewhere (`keep`).
    """

    __slots__ = (
        "_consumed",
        "_full",
        "_get",
        "_kept",
        "_lane",
        "_last_full",
        "_last_number",
        "_memory",
        "_nbytes",
        "_number",
        "_order",
        "_payload",
        "_room",
        "_slot",
        "_words",
    )

    holds = False

    def __init__(self, lane: LocalReceiver) -> None:
        self._lane = lane
        self._words = lane.words
        self._order = lane.node.order
        self._memory, self._room = lane.memory, lane.ring_room
        self._get = lane.read
        self._slot = self._number = 0
        self._full = self._nbytes = self._consumed = self._payload = 0
        self._last_full = self._last_number = 0
        self._kept: Object | Exception | None = None

    def start(self, value: Any) -> None:
        """See `Port`."""
        number, place = self._lane.claim()
        self._number = number
        self._slot, self._full, self._nbytes, self._consumed, self._payload = place[:5]
        self._last_full, self._last_number = place[5], number + place[6]
        self._kept = None
        self._lane.expect(self)

    def fail(self, poison: Poison) -> None:
        """See `Port`."""
        self.start(None)

    def poll(self) -> bool:
        """See `Port`."""
        if self._words[self._full] < self._number:
            self._lane.make_room()
            return False
        if self._order is not None:
            self._order()
        return True

    def keep(self) -> bool:
        """Move the object out of its slot, if it has arrived; whether it has."""
        if self._words[self._full] < self._number:
            return False
        if self._order is not None:
            self._order()
        try:
            self._kept = Object(self._read())
        except Exception as error:  # raised again by `take`, where the executor can say whose it is
            self._kept = error
        return True

    def peek_error(self) -> Poison | None:
        """See `Port`."""
        if self._kept is not None:
            return self._kept if isinstance(self._kept, Poison) else None
        words = self._words
        if words[self._consumed] >= self._number or not self.poll():
            return None
        return self._lane.read_poison(self._slot) if words[self._nbytes] >= POISON else None

    def take(self) -> Any:
        """See `Port`."""
        kept, self._kept = self._kept, None
        if kept is None:
            self._lane.expected.remove(self)
            return self._read()
        if isinstance(kept, Exception):
            raise kept
        return kept.value

    def _read(self) -> Any:
        """The object, out of its slot, which may be overwritten from then on."""
        size = self._words[self._nbytes]
        nbytes = size & SIZE_MASK
        at = self._payload
        try:
            if nbytes > self._room:
                memory, at, private = self._lane.find(self._slot, size)
                return _value(size, memory, at, nbytes, private)
            if size & (PICKLE | RAW):
                if size & INLINE:
                    at = 8 * (self._full - FULL + IN_HEADER)
                content = self._get(at, nbytes)
                return content if size & RAW else pickle.loads(content)
            return _value(size, self._memory, at, nbytes, False)
        finally:
            words = self._words
            if words[self._last_full] >= self._last_number or self._order is not None:
                self._lane.consume(self._consumed, self._number)
            else:
                # The ring is not full, so its sender does not wait for this slot. It would look
                # hundreds of times before it slept, so nothing needs to be ordered either.
                words[self._consumed] = self._number

    def release(self) -> None:
        """See `Port`."""


class Object:
    """An object that was received and not taken yet; tells it from none."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _value(size: int, memory: memoryview, at: int, nbytes: int, private: bool) -> Any:
    """The object of a message, by what its header says that it is.

    Args:
        private: whether it may keep the memory.

    Raises:
        Poison: it is an error.
        Exception: it cannot be unpickled.
    """
    content = memory[at : at + nbytes]
    if size & RAW:
        return bytes(content)
    if size & POISON:
        raise Poison.from_bytes(content)
    if size & PICKLE:
        return pickle.loads(content)
    return decode(memory, at, nbytes, private)
