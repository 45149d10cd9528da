"""Layouts of shared memory: a machine's control block, and the slots of a channel.

All words are 8 bytes, and each has exactly one process that writes it. Words of
different processes lie in different cache lines (64 bytes).
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
# Second line: the last epoch in which the rank has reached each barrier; how many collective calls
# of the world it has made, in the upper half, and its epoch in the last of them; the digest of its
# arguments to its execution; and the plans of its last two executions, the one of the odd epoch
# second. A rank is never two executions ahead of another.
REACHED: Final = WORDS
CALLS: Final = WORDS + 4
DIGEST: Final = WORDS + 5
PLANS: Final = WORDS + 6
# What other machines are told of a rank: where it is, how far it has come, and its digest.
STATUS_WORDS: Final = DIGEST + 1
# Third line: the last epoch that has failed here, and the pickled error's bytes, if the failure
# began here. An error larger than its room in the block lies in a segment, whose key is here.
FAILED: Final = 2 * WORDS
ERROR_KEY: Final = 2 * WORDS + 1
ERROR_BYTES: Final = 2 * WORDS + 2
# How far the rank has come in starting over; and, in the driver's row, the number of the execution
# with which all ranks go on.
RESTART: Final = 2 * WORDS + 3
RESTART_AT: Final = 2 * WORDS + 4
# The last epoch that has failed here before the rank began its program.
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

# A slot's header, written by the sender: the number of its message, the message's bytes, and, where
# these do not fit into the slot, the buffer that holds them (`queues/shared_buffers.py`): key and
# bytes of its segment, its name, and, if it is lent, the number of this lending. Content of a few
# bytes takes the place of the last words: its reader then fetches one cache line from the other
# core, not two.
FULL: Final = 0
NBYTES: Final = 1
BUFFER_KEY: Final = 2
BUFFER_BYTES: Final = 3
BUFFER: Final = 4
LENDING: Final = 5
IN_HEADER: Final = 4
IN_HEADER_BYTES: Final = 8 * (WORDS - IN_HEADER)
# Marks of a message, added to its bytes in the header: it is an error in place of a value; an
# object as a bare pickle; bytes as they are. Any message may also be in a lent buffer; a bare
# pickle or bytes may be in the header. No room is as large as a mark, so most readers look at marks
# only where a message seems not to fit. All marks fit into 62 bits, with which compiled code is
# fastest.
POISON: Final = 1 << 59
PICKLE: Final = 1 << 58
RAW: Final = 1 << 57
LENT: Final = 1 << 56
INLINE: Final = 1 << 55
SIZE_MASK: Final = INLINE - 1


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """A channel's segment: slot headers, then what each reader has consumed, then payloads.

    The first slots are those that the plan assigns. After them comes a ring, whose slots are used
    in turn by the messages that have no planned slot.

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
