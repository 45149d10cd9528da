"""Layouts of shared memory: a machine's control block, and the slots of a channel.

All words are 8 bytes, and each has exactly one process that writes it. What different processes
write lies in different cache lines (64 bytes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LINE: Final = 64
WORDS: Final = 8  # words in a cache line

# -- control block: one row per rank of the world ------------------------------------------------

ROW: Final = 5 * WORDS  # words of a row
# First two lines: where the rank is, read in slow paths only. Written by the rank or, for a rank
# of another machine, by the leader of this one.
STATE: Final = 0
EPOCH: Final = 1
PLAN: Final = 2
EXECUTION: Final = 3
AT: Final = 4
AWAITED: Final = 5
RUNNING: Final = 6
BEAT: Final = 7
# Second line: the last epoch of which the rank has reached each barrier; how many collective calls
# of the world it has made, in the upper half, and its epoch in the last of them; the digest of what
# it gives to its execution; and the plans of its last two executions, that of an odd epoch second.
# A rank is never two ahead of another one.
REACHED: Final = WORDS
CALLS: Final = WORDS + 4
DIGEST: Final = WORDS + 5
PLANS: Final = WORDS + 6
# What other machines are told of a rank: where it is, how far it has come, and what it gives.
STATUS_WORDS: Final = DIGEST + 1
# Third line: the epoch that has failed here, and the bytes of the pickled error, if it began here.
# An error larger than its room in the block lies in a segment.
FAILED: Final = 2 * WORDS
ERROR_KEY: Final = 2 * WORDS + 1
ERROR_BYTES: Final = 2 * WORDS + 2
# And how far the rank has come in starting over, and, of the driver, the number of the execution
# with which all go on.
RESTART: Final = 2 * WORDS + 3
RESTART_AT: Final = 2 * WORDS + 4
# And the last epoch that has failed here before the rank began its program.
REFUSED: Final = 2 * WORDS + 5
# Fourth line: whether the rank sleeps or is about to.
WAITING: Final = 3 * WORDS
# After all rows, each rank has room for an error, and then for what it is doing, in words.
ERROR_ROOM: Final = 16 * 1024
DOING_ROOM: Final = 1024


def block_bytes(ranks: int) -> int:
    """Bytes of the control block of a world."""
    return ranks * (8 * ROW + ERROR_ROOM + DOING_ROOM)


def error_at(rank: int, ranks: int) -> int:
    """Byte offset of a rank's room for an error."""
    return ranks * 8 * ROW + rank * ERROR_ROOM


def doing_at(rank: int, ranks: int) -> int:
    """Byte offset of a rank's room for what it is doing."""
    return ranks * (8 * ROW + ERROR_ROOM) + rank * DOING_ROOM


# -- slots of a channel --------------------------------------------------------------------------

# A slot's header, written by the sender: number of the message in it, its bytes, and, where these
# did not fit into the slot, the buffer that holds them (`shared_buffers.py`): key and bytes of its
# segment, its name, and, if it is lent, the number of this lending. The last words make way for
# content of a few bytes: its reader then takes one cache line from the other core, and not two.
FULL: Final = 0
NBYTES: Final = 1
BUFFER_KEY: Final = 2
BUFFER_BYTES: Final = 3
BUFFER: Final = 4
LENDING: Final = 5
IN_HEADER: Final = 4
IN_HEADER_BYTES: Final = 8 * (WORDS - IN_HEADER)
# What a message is, added to its bytes in the header: an error in place of a value; an object as a
# bare pickle; bytes as they are; and, beside any of these, that it is in a buffer that is lent; or
# beside the second and third, that it is in the header. No room is that large, so most readers look
# at this only where a message seems not to fit. All of it fits into 62 bits, with which compiled
# code is fastest.
POISON: Final = 1 << 59
PICKLE: Final = 1 << 58
RAW: Final = 1 << 57
LENT: Final = 1 << 56
INLINE: Final = 1 << 55
SIZE_MASK: Final = INLINE - 1


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """A channel's segment: slot headers, then what each reader has consumed, then payloads.

    The first slots are those that the plan gave out; after them comes a ring, used in turn by
    the messages that have no slot.

    Attributes:
        planned: number of planned slots.
        planned_bytes: room in each, a multiple of the cache line.
        ring: number of slots of the ring.
        ring_bytes: room in each, a multiple of the cache line.
        readers: number of processes that read every message.
    """

    planned: int
    planned_bytes: int
    ring: int
    ring_bytes: int
    readers: int

    @property
    def slots(self) -> int:
        """Number of all slots."""
        return self.planned + self.ring

    def room(self, slot: int) -> int:
        """Bytes that fit into a slot."""
        return self.planned_bytes if slot < self.planned else self.ring_bytes

    def header(self, slot: int) -> int:
        """Word index of a slot's header."""
        return slot * WORDS

    def consumed(self, reader: int, slot: int) -> int:
        """Word index of the number of the last message in `slot` that `reader` is done with."""
        return self.slots * WORDS + reader * round_up(self.slots, WORDS) + slot

    def payload(self, slot: int) -> int:
        """Byte offset of a slot's payload."""
        start = 8 * self.consumed(self.readers, 0)
        ring_slots = max(slot - self.planned, 0)
        return start + (slot - ring_slots) * self.planned_bytes + ring_slots * self.ring_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole segment."""
        return self.payload(self.slots)


def round_up(count: int, unit: int = LINE) -> int:
    """The next multiple of `unit`."""
    return -(-count // unit) * unit
