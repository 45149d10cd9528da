"""Shared buffers: memory for messages that are too large for their slots.

A buffer that is *lent* belongs to the receiver for as long as the receiver uses the value. The
sender does not touch it before the receiver has given it back. The receiver makes its value in
place, without a copy, and gives the buffer back when nothing refers to it any more: arrays,
tensors, or views of them. A value that a user keeps is therefore never overwritten. A queue that
has lent as many buffers as it may, or that several ranks read, writes into a buffer beside the slot
instead, and receivers copy from there.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import numpy as np

from ...errors import TransportError
from ..memory.layout import LINE, round_up
from ..memory.segments import SharedSegment
from ..waiting.node import MachineNode

LIMIT: Final = 2
"""Buffers that one queue lends: one to write to while the last value is still in use. More buffers
would be lent only to receivers that keep their values, and copies suit these as well."""

_RETURNED: Final = 0  # word of a buffer: how often its receiver has given it back
_PLACE_BITS: Final = 32
_PLACE_MASK: Final = (1 << _PLACE_BITS) - 1
_SPARE: Final = 1 << 20
_MANY: Final = 4


class SharedBuffer:
    """A segment of a sender, for one message at a time.

    Attributes:
        name: its number, unique in the queue; the lowest bits are its place in the queue.
        key: the segment's key.
        memory: all of it; a message begins at byte `LINE`.
        lent: how often it has been lent.
        sealed: whether nobody can open it any more.
    """

    __slots__ = ("_returned", "key", "lent", "memory", "name", "sealed")

    def __init__(self, segment: SharedSegment, name: int) -> None:
        self.name = name
        self.key = segment.key
        self.memory = memoryview(segment.memory)
        self.lent = 0
        self.sealed = False
        self._returned = self.memory[:LINE].cast("Q")

    @property
    def room(self) -> int:
        """Bytes of the largest message."""
        return self.memory.nbytes - LINE

    @property
    def is_free(self) -> bool:
        """Return whether the receiver has given it back."""
        return self._returned[_RETURNED] == self.lent


class SendBuffers:
    """The buffers of a queue's sender."""

    def __init__(self, node: MachineNode) -> None:
        self._node = node
        self._to_lend: list[SharedBuffer] = []  # the last lent first, as it is in the caches
        self._beside: dict[int, SharedBuffer] = {}
        self._count = 0

    @property
    def to_lend(self) -> tuple[SharedBuffer, ...]:
        """The buffers that are lent, or can be."""
        return tuple(self._to_lend)

    def find(self, nbytes: int, is_held: bool = False) -> SharedBuffer | None:
        """A buffer to lend, for a message; None if all are lent, or no memory is left.

        A receiver that keeps a small value would keep all of a large buffer, so only a value that
        is held for a while (`is_held`) may lie in a buffer of any size.
        """
        fallow = None
        for buffer in self._to_lend:
            if not buffer.is_free:
                continue
            if nbytes <= buffer.room and (is_held or buffer.room <= max(_MANY * nbytes, _SPARE)):
                return buffer
            fallow = buffer
        place = len(self._to_lend)
        is_full = place == LIMIT
        if is_full and fallow is None:
            return None
        try:
            segment = self._node.segments.create(round_up(LINE + nbytes, 4096))
        except OSError:
            return None
        if is_full and fallow is not None:
            place = fallow.name & _PLACE_MASK
            self._to_lend.remove(fallow)
            self._seal(fallow)
        buffer = self._named(segment, place)
        self._to_lend.insert(0, buffer)
        return buffer

    def lend(self, buffer: SharedBuffer) -> int:
        """Lend a buffer, whose message is written, until the receiver gives it back.

        Returns:
            The number of this lending.
        """
        if buffer.lent:
            self._seal(buffer)  # The receiver has opened it, so its descriptor can go.
        buffer.lent += 1
        if self._to_lend[0] is not buffer:
            self._to_lend.remove(buffer)
            self._to_lend.insert(0, buffer)
        return buffer.lent

    def beside(self, slot: int, nbytes: int) -> SharedBuffer:
        """The buffer beside a slot, from which receivers copy.

        Raises:
            OSError: no memory is left.
        """
        buffer = self._beside.get(slot)
        if buffer is None or buffer.room < nbytes:
            if buffer is not None:
                self._seal(buffer)
                nbytes = max(nbytes, buffer.room * 3 // 2)
            segment = self._node.segments.create(round_up(LINE + nbytes, 4096))
            buffer = self._beside[slot] = self._named(segment, LIMIT + slot)
        return buffer

    def close(self) -> None:
        """Let go of all buffers; those that are lent live on as long as they are used."""
        for buffer in (*self._to_lend, *self._beside.values()):
            self._seal(buffer)
        self._to_lend.clear()
        self._beside.clear()

    def _named(self, segment: SharedSegment, place: int) -> SharedBuffer:
        self._count += 1
        return SharedBuffer(segment, self._count << _PLACE_BITS | place)

    def _seal(self, buffer: SharedBuffer) -> None:
        if not buffer.sealed:
            self._node.segments.seal(buffer.key)
            buffer.sealed = True


class RecvBuffers:
    """The buffers of a queue's sender, as a receiver opens them.

    Args:
        node: this machine.
        sender: the rank that writes them.
    """

    def __init__(self, node: MachineNode, sender: int) -> None:
        self._node = node
        self._sender = sender
        self._known: dict[int, tuple[int, memoryview, memoryview]] = {}
        self._used: dict[tuple[int, int], weakref.ref[Any]] = {}

    def open(self, name: int, key: int, nbytes: int) -> memoryview:
        """The memory of a buffer.

        Args:
            name, key: the buffer's name and key.
            nbytes: the bytes of its segment.

        Raises:
            TransportError: the segment cannot be opened.
        """
        place = name & _PLACE_MASK
        known = self._known.get(place)
        if known is None or known[0] != name:
            try:
                mapped = self._node.segments.open(self._node.pids[self._sender], key, nbytes)
            except OSError as error:
                raise TransportError(
                    f"a message of rank {self._sender} cannot be opened; has it ended? {error}"
                ) from error
            memory = memoryview(mapped)
            known = self._known[place] = (name, memory, memory[:LINE].cast("Q"))
        return known[1]

    def borrow(self, name: int, key: int, nbytes: int, number: int) -> memoryview:
        """The memory of a lent buffer, which goes back when nothing refers to it any more.

        Args:
            name, key, nbytes: as for `open`.
            number: the number of this lending.

        Raises:
            TransportError: the segment cannot be opened.
        """
        owner = np.frombuffer(self.open(name, key, nbytes), dtype=np.uint8)
        words = self._known[name & _PLACE_MASK][2]
        order, used = self._node.order, self._used

        def give_back(gone: weakref.ref[Any]) -> None:
            if order is not None:
                order()
            words[_RETURNED] = number
            del used[name, number]

        used[name, number] = weakref.ref(owner, give_back)
        return owner.data

    def close(self) -> None:
        """Forget all buffers; those in use live on."""
        self._known.clear()
