"""Lanes inside a machine: slots in shared memory, one writer and one or more readers.

A slot carries one message at a time. The sender counts the messages it has put into a slot, and
each reader those it is done with; a slot is free when all counts are equal. Both counts only grow
and each has one writer, so a late reader can never mistake one message for another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from ...errors import TransportError
from ...failures.poison import Poison
from ..memory.cells import cells
from ..memory.layout import (
    FULL,
    IN_HEADER,
    IN_HEADER_BYTES,
    INLINE,
    LENDING,
    LENT,
    LINE,
    LOAN,
    LOAN_BYTES,
    LOAN_KEY,
    NBYTES,
    OVERFLOW_BYTES,
    OVERFLOW_KEY,
    POISON,
    SIZE_MASK,
    SlotLayout,
    round_up,
)
from ..memory.segments import Segment
from ..memory.shared_buffers import Borrower, Lender
from ..node import Node
from .messages import Active, Incoming, Outgoing


class LocalSender:
    """Writes the slots of one segment.

    Args:
        node: this machine.
        layout: of the segment.
        memory: the segment.
        readers: the ranks that read it, in the order of the layout's readers.
        active: where to register while messages are queued.

    Attributes:
        node: this machine.
        words: the segment as words of 8 bytes.
        queue: the messages that wait for their slots.
        sent: how many messages have been put into each slot.
    """

    def __init__(
        self,
        node: Node,
        layout: SlotLayout,
        memory: memoryview,
        readers: Sequence[int],
        active: Active,
    ) -> None:
        self.node = node
        self._layout = layout
        self._memory = memory
        self.words = memory.cast("Q")
        self._write = cells(memory, node.order).put
        self._readers = tuple(readers)
        self._sleepers = [(node.waiting(rank), rank) for rank in readers]
        # Not looked up in a class that is not compiled each time.
        self._order, self._fence, self._waiting = node.order, node.fence, node.words
        self._active = active
        self.queue: deque[Outgoing] = deque()
        self.sent = [0] * layout.slots
        self._next = 0
        self._consumed = [
            tuple(layout.consumed(reader, slot) for reader in range(layout.readers))
            for slot in range(layout.slots)
        ]
        self._places = [(layout.header(s), layout.payload(s)) for s in range(layout.slots)]
        # For each place in the ring: slot, words of size and number; the bytes at which the payload
        # begins, and where it is in the header.
        self._ring = [
            (slot, header + NBYTES, header + FULL, payload, 8 * (header + IN_HEADER))
            for slot, (header, payload) in enumerate(self._places)
            if slot >= layout.planned
        ]
        self._ring_room = layout.ring_bytes
        self._after = [*range(1, layout.ring), 0]
        self._free = 0
        self._overflow: dict[int, tuple[Segment, memoryview]] = {}
        # What several read in one place would be nobody's own.
        self._lender = Lender(node) if len(self._readers) == 1 else None

    def put(self, content: bytes, mark: int) -> bool:
        """Write a small message into the ring at once; whether its slot was free."""
        nbytes = len(content)
        if nbytes > self._ring_room or self.queue or not self._has_room():
            return False
        ring = self._next
        slot, nbytes_word, full_word, at, in_header = self._ring[ring]
        if nbytes <= IN_HEADER_BYTES:
            at, mark = in_header, mark | INLINE
        if self._order is not None:
            self._order()
        number = self.sent[slot] + 1
        self._write(at, content, nbytes_word, nbytes | mark, full_word, number)
        self.sent[slot] = number
        self._advance()
        self.announce()
        return True

    def announce(self) -> None:
        """Wake the readers that sleep; after the store of a slot's number."""
        self._fence()
        waiting = self._waiting
        for word, rank in self._sleepers:
            if waiting[word]:
                self.node.ring(rank)

    def place_of(self, slot: int) -> tuple[tuple[int, ...], int, int, memoryview, int]:
        """Where a message for a planned slot is written.

        Returns:
            The words of what its readers have consumed, of its size and of its number; the memory
            and the byte in it at which the payload begins.
        """
        header, payload = self._places[slot]
        return self._consumed[slot], header + NBYTES, header + FULL, self._memory, payload

    def push(self, message: Outgoing) -> None:
        """See `SendLane`."""
        if self.queue or not self._send(message):
            message.keep()
            self.queue.append(message)
            self._active[self] = None

    def progress(self) -> None:
        """See `SendLane`."""
        queue = self.queue
        while queue and self._send(queue[0]):
            queue.popleft()
        if not queue:
            self._active.pop(self, None)

    def reset(self) -> None:
        """Forget all messages; the readers reset in the same pause."""
        self.queue.clear()
        self._active.pop(self, None)
        self.sent = [0] * self._layout.slots
        self._next = self._free = 0
        for header, _ in self._places:
            for word in (FULL, NBYTES, OVERFLOW_KEY, OVERFLOW_BYTES):
                self.words[header + word] = 0
        self._drop_overflow()

    def close(self) -> None:
        """Withdraw what nobody has opened yet."""
        self.queue.clear()
        self._active.pop(self, None)
        self._drop_overflow()

    def _has_room(self) -> bool:
        """Whether the next slot of the ring is free.

        It is not looked at each time: the words that say so are in a cache line of the reader's,
        and it costs that one as much to write there again.
        """
        if not self._free:
            ring = self._next
            while self._free < len(self._ring) and self._is_free(self._ring[ring][0]):
                self._free += 1
                ring = self._after[ring]
        return self._free > 0

    def _is_free(self, slot: int) -> bool:
        """Whether all readers are done with what is in a slot."""
        sent, words = self.sent[slot], self.words
        for word in self._consumed[slot]:  # noqa: SIM110 # a generator would cost half a microsecond
            if words[word] != sent:
                return False
        return True

    def _advance(self) -> None:
        """The next slot of the ring has been used."""
        self._next = self._after[self._next]
        self._free -= 1

    def _send(self, message: Outgoing) -> bool:
        """Write a message if its slot is free."""
        slot = message.slot
        if slot is None:
            if not self._has_room():
                return False
            slot = self._ring[self._next][0]
        elif not self._is_free(slot):
            return False
        node, words = self.node, self.words
        if node.order is not None:
            node.order()
        header, payload = self._places[slot]
        mark = message.mark
        if message.nbytes <= self._layout.room(slot):
            message.write(slot, self._memory, payload)
        elif self._lend(slot, message):
            mark |= LENT
        else:
            message.write(slot, self._grow(slot, message.nbytes), 0)
        words[header + NBYTES] = message.nbytes | mark
        if node.order is not None:
            node.order()
        words[header + FULL] = self.sent[slot] = self.sent[slot] + 1
        if message.slot is None:
            self._advance()
        message.finish()
        self.announce()
        return True

    def _lend(self, slot: int, message: Outgoing) -> bool:
        """Write a message that does not fit into its slot into memory that the receiver keeps."""
        lender = self._lender
        if lender is None or message.mark & POISON:  # which may be looked at ahead of time
            return False
        loan = lender.find(message.nbytes)
        if loan is None:
            return False
        message.write(slot, loan.memory, LINE)
        header, words = self._places[slot][0], self.words
        words[header + LENDING] = lender.lend(loan)
        words[header + LOAN] = loan.name
        words[header + LOAN_KEY] = loan.key
        words[header + LOAN_BYTES] = loan.memory.nbytes
        return True

    def _grow(self, slot: int, nbytes: int) -> memoryview:
        """Memory beside the slot for a message that does not fit into it."""
        current = self._overflow.get(slot)
        if current is not None and current[1].nbytes >= nbytes:
            return current[1]
        if current is not None:
            self.node.segments.seal(current[0].key)
            nbytes = max(nbytes, current[1].nbytes * 3 // 2)
        try:
            segment = self.node.segments.create(round_up(nbytes, 4096))
        except OSError as error:
            raise TransportError(
                f"there is no shared memory for a message of {nbytes} bytes to rank(s) "
                f"{', '.join(map(str, self._readers))}: {error}"
            ) from error
        memory = memoryview(segment.memory)
        self._overflow[slot] = (segment, memory)
        header = self._places[slot][0]
        self.words[header + OVERFLOW_KEY] = segment.key
        self.words[header + OVERFLOW_BYTES] = memory.nbytes
        return memory

    def _drop_overflow(self) -> None:
        for segment, _ in self._overflow.values():
            self.node.segments.seal(segment.key)
        self._overflow.clear()
        if self._lender is not None:
            self._lender.close()


class Expected(Protocol):
    """A port of a message that stays in the ring until it is taken."""

    def keep(self) -> bool:
        """Move the message out of the ring, if it has arrived; whether it has."""


class LocalReceiver:
    """Reads the slots of a segment that another process writes.

    Args:
        node: this machine.
        layout: of the segment.
        memory: the segment.
        sender: the rank that writes it.
        reader: which of the layout's readers this is.
        active: where to register while messages are awaited.
    """

    def __init__(
        self,
        node: Node,
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
        self._overflow: dict[int, tuple[int, int, memoryview]] = {}
        self._borrower = Borrower(node, sender)
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
        self.expected: deque[Expected] = deque()

    def expect(self, port: Expected) -> None:
        """Note a port whose message stays in the ring until it is taken.

        The sender may count on a message leaving the ring once it has been asked for, whatever
        this rank waits for first. So where more are expected than the ring holds, the lane takes
        part in `progress`.
        """
        self.expected.append(port)
        if len(self.expected) >= self._layout.ring:
            self._active[self] = None

    def make_room(self) -> None:
        """Move what has arrived out of the ring, if it might keep out what is waited for."""
        expected = self.expected
        while len(expected) >= self._layout.ring and expected[0].keep():
            expected.popleft()

    def post(self, message: Incoming) -> None:
        """See `ReceiveLane`."""
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
        """See `ReceiveLane`."""
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
            message.arrive(slot, memory, at, size & SIZE_MASK, private, mark)
            del memory  # what is lent goes back with the last who uses it
            pending.popleft()
            if not message.hold or message.error is not None:
                self.release(message)
        self.make_room()
        if len(self.expected) < self._layout.ring:
            self._active.pop(self, None)

    def release(self, message: Incoming) -> None:
        """See `ReceiveLane`."""
        slot, number = message.at
        self.consume(self._places[slot][1], number)

    def claim(self) -> tuple[int, tuple[int, ...]]:
        """Where the next message of the ring that nobody has asked for will be.

        Returns:
            Its number in its slot. And of the place: the slot, the words of its number, size, and
            consumption, the byte at which the payload begins; then, of the message with which the
            ring will be full, the word of its number, and by how much that number is larger.
        """
        ring = self._next
        self._next = self._after[ring]
        place = self._ring[ring]
        number = self._posted[place[0]] = self._posted[place[0]] + 1
        return number, place

    def next_number(self, slot: int) -> int:
        """The number of the next message in `slot` that nobody has asked for yet."""
        self._posted[slot] += 1
        return self._posted[slot]

    def words_of(self, slot: int) -> tuple[int, int, int]:
        """Word indices of a slot's message number, its size, and what this reader has consumed."""
        header, consumed, _ = self._places[slot]
        return header + FULL, header + NBYTES, consumed

    def payload_of(self, slot: int) -> tuple[memoryview, int]:
        """Memory and byte offset of a slot's payload where it fits into the slot."""
        return self.memory, self._places[slot][2]

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
        """Forget all messages; the sender resets in the same pause."""
        self._pending.clear()
        self.expected.clear()
        self._active.pop(self, None)
        self._posted = [0] * self._layout.slots
        self._next = 0
        self._overflow.clear()
        self._borrower.close()
        for _, consumed, _ in self._places:
            self.words[consumed] = 0

    def close(self) -> None:
        """Let go of the sender's memory."""
        self._pending.clear()
        self._active.pop(self, None)
        self._overflow.clear()
        self._borrower.close()

    def read_poison(self, slot: int) -> Poison:
        """The error that is in `slot` in place of a value."""
        size = self.words[self._places[slot][0] + NBYTES]
        memory, at, _ = self.find(slot, size)
        return Poison.from_bytes(memory[at : at + (size & SIZE_MASK)])

    def find(self, slot: int, size: int) -> tuple[memoryview, int, bool]:
        """Where the message in `slot` is that has `size` in its header; once for each message.

        Returns:
            The memory, the offset, and whether the memory is the receiver's own: it is lent, and
            given back when nothing refers to it any more.
        """
        header, _, payload = self._places[slot]
        if size & INLINE:
            return self.memory, 8 * (header + IN_HEADER), False
        if size & LENT:
            words = self.words
            name, key, nbytes = (words[header + word] for word in (LOAN, LOAN_KEY, LOAN_BYTES))
            memory = self._borrower.borrow(name, key, nbytes, words[header + LENDING])
            return memory, LINE, True
        if size & SIZE_MASK <= self._layout.room(slot):
            return self.memory, payload, False
        key, room = self.words[header + OVERFLOW_KEY], self.words[header + OVERFLOW_BYTES]
        known = self._overflow.get(slot)
        if known is None or known[:2] != (key, room):
            try:
                mapped = self.node.segments.open(self.node.pids[self.sender], key, room)
            except OSError as error:
                raise TransportError(
                    f"a message of rank {self.sender} cannot be opened; has it ended? {error}"
                ) from error
            known = self._overflow[slot] = (key, room, memoryview(mapped))
        return known[2], 0, False
