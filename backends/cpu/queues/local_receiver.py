"""The receiver's side of a queue inside a machine (`local_sender.py` has the other one)."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from ...poison import Poison
from ..memory.cells import cells
from ..memory.layout import (
    BUFFER,
    BUFFER_BYTES,
    BUFFER_KEY,
    FULL,
    IN_HEADER,
    INLINE,
    LENDING,
    LENT,
    LINE,
    NBYTES,
    SIZE_MASK,
    SlotLayout,
)
from ..waiting.node import MachineNode
from .messages import Active, Incoming
from .shared_buffers import RecvBuffers


class InRing(Protocol):
    """A port whose message stays in the ring until it is taken."""

    def keep(self) -> bool:
        """Move the message out of the ring, if it has arrived; return whether it has."""


class LocalReceiver:
    """Reads the slots of a segment that another process writes; a `RecvQueue`.

    Args:
        node: this machine.
        layout: the segment's layout.
        memory: the segment.
        sender: the rank that writes it.
        reader: which of the layout's readers this is.
        active: where to register while messages are awaited.

    Attributes:
        node: this machine.
        sender: the rank that writes it.
        memory: the segment.
        words: the same as words of 8 bytes.
        read: copies bytes out of it.
        ring_room: bytes that fit into a slot of the ring.
        in_ring: the ports that have posted a receive in the ring and not taken it.
    """

    def __init__(
        self,
        node: MachineNode,
        layout: SlotLayout,
        memory: memoryview,
        sender: int,
        reader: int,
        active: Active,
    ) -> None:
        self.node = node
        self.sender = sender
        self._sleeper = node.waiting(sender)
        self._layout = layout
        self.words = memory.cast("Q")
        self.read = cells(memory, node.order).get
        self._active = active
        self._pending: deque[Incoming] = deque()
        self._posted = [0] * layout.slots
        self._next = 0
        self._places = [
            (layout.header(s), layout.consumed(reader, s), layout.payload(s))
            for s in range(layout.slots)
        ]
        self._buffers = RecvBuffers(node, sender)
        self._after = [*range(1, layout.ring), 0]
        self._ring = [
            (
                slot,
                header + FULL,
                header + NBYTES,
                consumed,
                payload,
                (self._places[slot - 1] if slot > layout.planned else self._places[-1])[0] + FULL,
                int(slot > layout.planned),
            )
            for slot, (header, consumed, payload) in enumerate(self._places)
            if slot >= layout.planned
        ]
        self.memory = memory
        self.ring_room = layout.ring_bytes
        self.in_ring: deque[InRing] = deque()

    def post_in_ring(self, port: InRing) -> tuple[int, tuple[int, ...]]:
        """Post a receive of the ring's next message, which stays there until the port takes it.

        The sender relies on a message to leave the ring once its receive is posted, whatever else
        this rank waits for. So where more receives are posted than the ring holds, the queue takes
        part in `progress`.

        Returns:
            As `claim`.
        """
        self.in_ring.append(port)
        if len(self.in_ring) >= self._layout.ring:
            self._active[self] = None
        return self.claim()

    def make_room(self) -> None:
        """Move arrived messages out of the ring, if they might keep out an awaited one."""
        in_ring = self.in_ring
        while len(in_ring) >= self._layout.ring and in_ring[0].keep():
            in_ring.popleft()

    def post(self, message: Incoming) -> None:
        """Receive the next message into `message`."""
        message.clear()
        slot = message.slot
        if slot is None:
            number, place = self.claim()
            message.at = (place[0], number)
        else:
            message.at = (slot, self.next_number(slot))
        self._pending.append(message)
        self._active[self] = None

    def progress(self) -> None:
        """Note what has arrived."""
        pending, words = self._pending, self.words
        while pending:
            message = pending[0]
            slot, number = message.at
            header = self._places[slot][0]
            if words[header + FULL] < number:
                self.make_room()
                return
            if self.node.order is not None:
                self.node.order()
            size = words[header + NBYTES]
            memory, at, private = self.find(slot, size)
            mark = size & ~(SIZE_MASK | LENT | INLINE)
            message.arrive(memory, at, size & SIZE_MASK, private, mark)
            del memory  # This reference would keep a lent buffer from going back.
            pending.popleft()
            if not message.hold or message.error is not None:
                self.release(message)
        self.make_room()
        if len(self.in_ring) < self._layout.ring:
            self._active.pop(self, None)

    def release(self, message: Incoming) -> None:
        """Give back the slot of a message that was held."""
        slot, number = message.at
        self.consume(self._places[slot][1], number)

    def claim(self) -> tuple[int, tuple[int, ...]]:
        """Claim the place of the ring's next message for which no receive is posted.

        Returns:
            The message's number in its slot; and its place: the slot; the words of its number, its
            size and its consumption; the byte at which the payload begins; and, for the message
            that will fill the ring, the word of its number, and by how much that number is larger.
        """
        ring = self._next
        self._next = self._after[ring]
        place = self._ring[ring]
        number = self._posted[place[0]] = self._posted[place[0]] + 1
        return number, place

    def next_number(self, slot: int) -> int:
        """The number of the next message in `slot` for which no receive is posted."""
        self._posted[slot] += 1
        return self._posted[slot]

    def place_of(self, slot: int) -> tuple[int, int, int, int]:
        """Find the place in which a message of a planned slot is read.

        Returns:
            The words of its number, its size, and what this reader has consumed; and the byte at
            which the payload begins.
        """
        header, consumed, payload = self._places[slot]
        return header + FULL, header + NBYTES, consumed, payload

    def consume(self, word: int, number: int) -> None:
        """Say that the message `number` of the slot of `word` may be overwritten."""
        node = self.node
        if node.order is not None:
            node.order()
        self.words[word] = number
        node.fence()
        if node.words[self._sleeper]:
            node.ring(self.sender)

    def reset(self) -> None:
        """Forget all messages; the sender resets between the same barriers."""
        self.close()
        self.in_ring.clear()
        self._posted = [0] * self._layout.slots
        self._next = 0
        for _, consumed, _ in self._places:
            self.words[consumed] = 0

    def close(self) -> None:
        """Let go of the sender's memory."""
        self._pending.clear()
        self._active.pop(self, None)
        self._buffers.close()

    def read_poison(self, slot: int) -> Poison:
        """The error that is in `slot` in place of a value."""
        size = self.words[self._places[slot][0] + NBYTES]
        memory, at, _ = self.find(slot, size)
        return Poison.from_bytes(memory[at : at + (size & SIZE_MASK)])

    def find(self, slot: int, size: int) -> tuple[memoryview, int, bool]:
        """Find the message in `slot` whose header has `size`; called once for each message.

        Returns:
            The memory, the offset, and whether the memory is lent to this receiver. Lent memory
            goes back when nothing refers to it any more.
        """
        header, _, payload = self._places[slot]
        if size & INLINE:
            return self.memory, 8 * (header + IN_HEADER), False
        if size & SIZE_MASK <= self._layout.room(slot):
            return self.memory, payload, False
        words, buffers = self.words, self._buffers
        name, key, nbytes = (words[header + word] for word in (BUFFER, BUFFER_KEY, BUFFER_BYTES))
        if size & LENT:
            return buffers.borrow(name, key, nbytes, words[header + LENDING]), LINE, True
        return buffers.open(name, key, nbytes), LINE, False
