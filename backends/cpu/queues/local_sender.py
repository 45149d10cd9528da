"""The sender's side of a queue inside a machine: slots in shared memory, with one writer.

A slot carries one message at a time. The sender counts the messages that it has put into a slot,
and each reader counts those that it is done with; a slot is free when all counts are equal. Both
counts only grow and each has one writer, so a late reader can never mistake one message for
another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...errors import TransportError
from ..memory.cells import cells
from ..memory.layout import (
    BUFFER,
    BUFFER_BYTES,
    BUFFER_KEY,
    FULL,
    IN_HEADER,
    IN_HEADER_BYTES,
    INLINE,
    LENDING,
    LENT,
    LINE,
    NBYTES,
    POISON,
    SlotLayout,
)
from ..waiting.node import MachineNode
from .messages import Active, Outgoing
from .shared_buffers import SendBuffers


class LocalSender:
    """Writes the slots of one segment; a `SendQueue`.

    Args:
        node: this machine.
        layout: the segment's layout.
        memory: the segment.
        readers: the ranks that read it, in the order of the layout's readers.
        active: where to register while messages wait.

    Attributes:
        node: this machine.
        words: the segment as words of 8 bytes.
        unsent: the messages that wait for their slots.
        sent: how many messages have been put into each slot.
        buffers: the shared buffers for messages that do not fit into their slots.
    """

    def __init__(
        self,
        node: MachineNode,
        layout: SlotLayout,
        memory: memoryview,
        readers: Sequence[int],
        active: Active,
    ) -> None:
        self.node = node
        self._layout = layout
        self._memory = memory
        self.words = memory.cast("Q")
        self._write_small = cells(memory, node.order).put
        self._readers = tuple(readers)
        self._sleepers = [(node.waiting(rank), rank) for rank in readers]
        # Kept here, because looking them up each time in a class that is not compiled is slow.
        self._order, self._fence, self._waiting = node.order, node.fence, node.words
        self._active = active
        self.unsent: deque[Outgoing] = deque()
        self.sent = [0] * layout.slots
        self._next = 0
        self._consumed = [
            tuple(layout.consumed(reader, slot) for reader in range(layout.readers))
            for slot in range(layout.slots)
        ]
        self._places = [(layout.header(s), layout.payload(s)) for s in range(layout.slots)]
        # For each place in the ring: the slot, the words of size and number, and the byte at which
        # a payload begins, in the slot or in the header.
        self._ring = [
            (slot, header + NBYTES, header + FULL, payload, 8 * (header + IN_HEADER))
            for slot, (header, payload) in enumerate(self._places)
            if slot >= layout.planned
        ]
        self._ring_room = layout.ring_bytes
        self._after = [*range(1, layout.ring), 0]
        self._free = 0
        # A buffer that several ranks read in place would belong to none of them.
        self._lends = len(self._readers) == 1
        self.buffers = SendBuffers(node)

    def send_small(self, content: bytes, mark: int) -> bool:
        """Send a small message by the ring at once, if its slot is free; return whether it is."""
        nbytes = len(content)
        if nbytes > self._ring_room or self.unsent or not self._has_room():
            return False
        ring = self._next
        slot, nbytes_word, full_word, at, in_header = self._ring[ring]
        if nbytes <= IN_HEADER_BYTES:
            at, mark = in_header, mark | INLINE
        if self._order is not None:
            self._order()
        number = self.sent[slot] + 1
        self._write_small(at, content, nbytes_word, nbytes | mark, full_word, number)
        self.sent[slot] = number
        self._advance()
        self.wake_readers()
        return True

    def wake_readers(self) -> None:
        """Wake the readers that sleep; after the store of a slot's number."""
        self._fence()
        waiting = self._waiting
        for word, rank in self._sleepers:
            if waiting[word]:
                self.node.ring(rank)

    def place_of(self, slot: int) -> tuple[tuple[int, ...], int, int, memoryview, int]:
        """Find the place in which a message for a planned slot is written.

        Returns:
            The words of what its readers have consumed, of its size and of its number; the memory
            and the byte in it at which the payload begins.
        """
        header, payload = self._places[slot]
        return self._consumed[slot], header + NBYTES, header + FULL, self._memory, payload

    def send(self, message: Outgoing) -> None:
        """Send a loaded message, after all those before it."""
        if self.unsent or not self._write(message):
            message.keep()
            self.unsent.append(message)
            self._active[self] = None

    def progress(self) -> None:
        """Send what waits, as far as there is room."""
        unsent = self.unsent
        while unsent and self._write(unsent[0]):
            unsent.popleft()
        if not unsent:
            self._active.pop(self, None)

    def reset(self) -> None:
        """Forget all messages; the readers reset between the same barriers."""
        self.close()
        self.sent = [0] * self._layout.slots
        self._next = self._free = 0
        for header, _ in self._places:
            self.words[header + FULL] = self.words[header + NBYTES] = 0

    def close(self) -> None:
        """Forget unsent messages, and withdraw buffers that nobody has opened yet."""
        self.unsent.clear()
        self._active.pop(self, None)
        self.buffers.close()

    def _has_room(self) -> bool:
        """Return whether the next slot of the ring is free.

        The number of free slots is remembered. The words that tell it are in a cache line that a
        reader writes, and each look at the line delays the reader's next write to it.
        """
        if not self._free:
            ring = self._next
            while self._free < len(self._ring) and self._is_free(self._ring[ring][0]):
                self._free += 1
                ring = self._after[ring]
        return self._free > 0

    def _is_free(self, slot: int) -> bool:
        """Return whether all readers are done with what is in a slot."""
        sent, words = self.sent[slot], self.words
        for word in self._consumed[slot]:  # noqa: SIM110 # a generator would cost half a microsecond
            if words[word] != sent:
                return False
        return True

    def _advance(self) -> None:
        """Keep in mind that the next slot of the ring has been used."""
        self._next = self._after[self._next]
        self._free -= 1

    def _write(self, message: Outgoing) -> bool:
        """Write a message if its slot is free; return whether it is."""
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
            message.write(self._memory, payload)
        else:
            mark |= self._write_to_buffer(slot, message)
        words[header + NBYTES] = message.nbytes | mark
        if node.order is not None:
            node.order()
        words[header + FULL] = self.sent[slot] = self.sent[slot] + 1
        if message.slot is None:
            self._advance()
        message.finish()
        self.wake_readers()
        return True

    def _write_to_buffer(self, slot: int, message: Outgoing) -> int:
        """Write a message that does not fit into its slot; return the mark for its header."""
        buffers, words, header = self.buffers, self.words, self._places[slot][0]
        # An error is not lent, because it may be looked at ahead of time.
        lends = self._lends and not message.mark & POISON
        lent = buffers.find(message.nbytes, message.is_held) if lends else None
        try:
            buffer = lent or buffers.beside(slot, message.nbytes)
        except OSError as error:
            raise TransportError(
                f"there is no shared memory for a message of {message.nbytes} bytes to rank(s) "
                f"{', '.join(map(str, self._readers))}: {error}"
            ) from error
        message.write(buffer.memory, LINE)
        words[header + BUFFER] = buffer.name
        words[header + BUFFER_KEY] = buffer.key
        words[header + BUFFER_BYTES] = buffer.memory.nbytes
        if lent is None:
            return 0
        words[header + LENDING] = buffers.lend(lent)
        return LENT
