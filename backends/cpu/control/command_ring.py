"""Carry the commands of the driver: ring buffers in shared memory, messages between machines.

A ring has one writer, the driver, and one reader. Each word has a command and its number, so a
reader looks at one word only. A few times per round the reader says how far it has read, so that
the writer does not overtake it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from ...driven.commands import BITS
from ..memory.layout import WORDS
from ..waiting.node import MachineNode

SLOTS: Final = 1024
"""Commands in a ring; a power of two."""

_RING: Final = SLOTS + WORDS
"""Words of a ring: its commands, then the number of commands that its reader has read."""

_TELL_EVERY: Final = SLOTS // 4
_COMMAND_MASK: Final = (1 << BITS) - 1
_NUMBER_MASK: Final = (1 << (64 - BITS)) - 1
_MOST_UNDER_WAY: Final = 4 * _TELL_EVERY


class CommandRing:
    """Carries the commands of one driver, as a `CommandTransport`: a ring for each other rank.

    Making one is collective.

    Args:
        node: this machine.
        driver: the rank that writes.
        pause: how the driver waits for a reader that lags behind.

    Raises:
        TransportError: there is no shared memory for the rings.
    """

    def __init__(self, node: MachineNode, driver: int, pause: Callable[[int], None]) -> None:
        self._node = node
        self._driver = driver
        others = [rank for rank in range(node.size) if rank != driver]
        nodes = node.world.nodes
        near = [rank for rank in others if nodes[rank] == nodes[driver]]
        self._readers = tuple(near)
        self._tag = node.reserve_tags(1)
        nbytes = max(len(near), 1) * 8 * _RING
        own = {driver: nbytes} if node.rank == driver else {}
        to_open = {driver: (driver, nbytes)} if node.rank in near else {}
        memory = node.share(own, to_open, "the commands of a graph")
        self._words = memory.get(driver, memoryview(bytearray())).cast("Q")
        self._near: dict[int, _Near] = {}
        self._far: dict[int, _Far] = {}
        if node.rank == driver:
            self._near = {
                rank: _Near(node, self._words, index * _RING, pause)
                for index, rank in enumerate(near)
            }
            self._far = {
                rank: _Far(node.comm, rank, self._tag, pause)
                for rank in others
                if rank not in self._near
            }

    def publisher(self, to: Sequence[int], wake: Sequence[int]) -> Callable[[int], None]:
        node = self._node
        fence, order, waiting = node.fence, node.order, node.words
        near = [self._near[rank] for rank in to if rank in self._near]
        far = [self._far[rank] for rank in to if rank in self._far]
        sleepers = [(node.waiting(rank), rank) for rank in wake if rank in self._near]

        def put(command: int) -> None:
            if order is not None:
                order()
            for ring in near:
                ring.put(command)
            if sleepers:
                fence()
                for word, rank in sleepers:
                    if waiting[word]:
                        node.ring(rank)
            for sender in far:
                sender.put(command)

        return put

    def reader(self, rank: int) -> Callable[[], int]:
        if self._node.is_local(self._driver):
            return self._near_reader(rank)
        return self._far_reader()

    def mend(self) -> None:
        for ring in self._near.values():
            ring.mend()

    def _near_reader(self, rank: int) -> Callable[[], int]:
        words, order = self._words, self._node.order
        base = self._readers.index(rank) * _RING
        cursor = base + SLOTS
        count = words[cursor]

        def take() -> int:
            nonlocal count
            word = words[base + count % SLOTS]
            if word >> BITS != (count + 1) & _NUMBER_MASK:
                return 0
            if order is not None:
                order()
            count += 1
            if not count % _TELL_EVERY:
                words[cursor] = count
            return word & _COMMAND_MASK

        return take

    def _far_reader(self) -> Callable[[], int]:
        content = bytearray(8)
        request = self._node.comm.Recv_init(content, self._driver, self._tag)
        request.Start()
        self._node.world.at_end(_taking_back(request))

        def take() -> int:
            if not request.Test():
                return 0
            command = int.from_bytes(content, "little")
            request.Start()
            return command

        return take


def _taking_back(request: Any) -> Callable[[], bool]:
    """Make what cancels a posted receive when MPI ends; it returns whether that is done."""
    cancel = iter((request.Cancel,))

    def is_done() -> bool:
        for take_back in cancel:
            take_back()
        if not request.Test():
            return False
        request.Free()
        return True

    return is_done


class _Near:
    """The driver's end of the ring of one rank of its machine."""

    __slots__ = ("_base", "_count", "_floor", "_node", "_pause", "_words")

    def __init__(
        self, node: MachineNode, words: memoryview, base: int, pause: Callable[[int], None]
    ) -> None:
        self._node = node
        self._words = words
        self._base = base
        self._pause = pause
        self._count = self._floor = 0

    def put(self, command: int) -> None:
        """Write a command; waits for a reader that is a whole round behind."""
        count = self._count
        if count - self._floor == SLOTS:
            self._wait()
        self._words[self._base + count % SLOTS] = ((count + 1) & _NUMBER_MASK) << BITS | command
        self._count = count + 1

    def mend(self) -> None:
        """Count a command that was written, but not counted before an interruption."""
        count = self._count
        word = self._words[self._base + count % SLOTS]
        if word >> BITS == (count + 1) & _NUMBER_MASK:
            self._count = count + 1

    def _wait(self) -> None:
        words, cursor, polls = self._words, self._base + SLOTS, 0
        while True:
            self._floor = words[cursor]
            if self._count - self._floor < SLOTS:
                return
            self._node.wake_all()
            polls += 1
            self._pause(polls)


class _Far:
    """The driver's messages to one rank of another machine."""

    __slots__ = ("_comm", "_count", "_pause", "_rank", "_tag", "_under_way")

    def __init__(self, comm: Any, rank: int, tag: int, pause: Callable[[int], None]) -> None:
        self._comm = comm
        self._rank = rank
        self._tag = tag
        self._pause = pause
        self._count = 0
        self._under_way: deque[Any] = deque()

    def put(self, command: int) -> None:
        """Send a command. A synchronous message now and then keeps the reader in step."""
        comm, under_way = self._comm, self._under_way
        self._count += 1
        send = comm.Isend if self._count % _TELL_EVERY else comm.Issend
        under_way.append(send(command.to_bytes(8, "little"), self._rank, self._tag))
        polls = 0
        while under_way and under_way[0].Test():
            under_way.popleft()
        while len(under_way) > _MOST_UNDER_WAY:
            if under_way[0].Test():
                under_way.popleft()
                continue
            polls += 1
            self._pause(polls)
