"""The driver's records (`backends/records.py`): a ring in shared memory, messages between machines.

The ring has one writer and a reader for each other rank of the machine. Each word carries its own
number beside the record, so a reader looks at one word only. Readers say how far they are a few
times a round, so that the writer does not overtake them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import TransportError
from ..records import BITS
from .layout import LINE, WORDS
from .mpi import module_of
from .node import Node

SLOTS = 1024
"""Records in the ring; a power of two."""

_TELL_EVERY = SLOTS // 4
_RECORD_MASK = (1 << BITS) - 1
_NUMBER_MASK = (1 << (64 - BITS)) - 1
_MOST_UNDER_WAY = 4


class RecordRing:
    """The records of one driver; implements `Records`. Making one is collective.

    Args:
        node: this machine.
        driver: the rank that writes.
        pause: how the driver waits for a reader that lags behind.

    Raises:
        TransportError: there is no shared memory for the ring.
    """

    def __init__(self, node: Node, driver: int, pause: Callable[[int], None]) -> None:
        self._node = node
        self._driver = driver
        self._pause = pause
        others = [rank for rank in range(node.size) if rank != driver]
        near = [rank for rank in others if node.node_of(rank) == node.node_of(driver)]
        self._readers = tuple(near)
        self._sleepers = tuple((node.waiting(rank), rank) for rank in near)
        self._far = tuple(rank for rank in others if rank not in near)
        self._count = 0
        self._floor = 0
        self._tag = node.reserve_tags(1)
        self._under_way: deque[list[Any]] = deque()
        self._words = self._share()

    def publisher(self, wake: Sequence[int]) -> Callable[[int], None]:
        """See `Records`."""
        node, words, order = self._node, self._words, self._node.order
        fence, waiting = node.fence, node.words
        sleepers = tuple(sleeper for sleeper in self._sleepers if sleeper[1] in wake)

        def put(record: int) -> None:
            count = self._count
            if count - self._floor == SLOTS:
                self._wait_for_readers()
            if order is not None:
                order()
            words[count % SLOTS] = ((count + 1) & _NUMBER_MASK) << BITS | record
            self._count = count + 1
            if sleepers:
                fence()
                for word, rank in sleepers:
                    if waiting[word]:
                        node.ring(rank)
            if self._far:
                self._send(record)

        return put

    def reader(self, rank: int) -> Callable[[], int]:
        """See `Records`."""
        if self._node.is_local(self._driver):
            return self._near_reader(rank)
        return self._far_reader()

    def _near_reader(self, rank: int) -> Callable[[], int]:
        words, order = self._words, self._node.order
        cursor = SLOTS + self._readers.index(rank) * WORDS
        count = words[cursor]

        def take() -> int:
            nonlocal count
            word = words[count % SLOTS]
            if word >> BITS != (count + 1) & _NUMBER_MASK:
                return 0
            if order is not None:
                order()
            count += 1
            if not count % _TELL_EVERY:
                words[cursor] = count
            return word & _RECORD_MASK

        return take

    def _far_reader(self) -> Callable[[], int]:
        content = bytearray(8)
        request = self._node.comm.Recv_init(content, self._driver, self._tag)
        request.Start()

        def take() -> int:
            if not request.Test():
                return 0
            record = int.from_bytes(content, "little")
            request.Start()
            return record

        return take

    def _send(self, record: int) -> None:
        """To the other machines. A synchronous message now and then keeps readers in step."""
        comm = self._node.comm
        content = record.to_bytes(8, "little")
        send = comm.Isend if self._count % _TELL_EVERY else comm.Issend
        self._under_way.append([send(content, rank, self._tag) for rank in self._far])
        most = _MOST_UNDER_WAY * _TELL_EVERY
        polls = 0
        while self._under_way and module_of(comm).Request.Testall(self._under_way[0]):
            self._under_way.popleft()
        while len(self._under_way) > most:
            if module_of(comm).Request.Testall(self._under_way[0]):
                self._under_way.popleft()
                continue
            polls += 1
            self._pause(polls)

    def _wait_for_readers(self) -> None:
        """Wait until every reader has left the slot that is written next."""
        words, polls = self._words, 0
        cursors = [SLOTS + index * WORDS for index in range(len(self._readers))]
        while True:
            self._floor = min((words[cursor] for cursor in cursors), default=self._count)
            if self._count - self._floor < SLOTS:
                return
            self._node.wake_all()
            polls += 1
            self._pause(polls)

    def _share(self) -> memoryview:
        """Map the ring; all ranks take part."""
        node = self._node
        nbytes = SLOTS * 8 + max(len(self._readers), 1) * LINE
        key, problem, own = None, None, None
        if node.rank == self._driver:
            try:
                own = node.segments.create(nbytes)
                key = own.key
            except OSError as error:
                problem = str(error)
        answers = node.world.allgather((key, problem))
        key, problem = answers[self._driver]
        memory = None if own is None else own.memory
        if key is not None and node.rank in self._readers:
            try:
                memory = node.segments.open(node.pids[self._driver], key, nbytes)
            except OSError as error:
                problem = str(error)
        problems = node.world.allgather(problem)
        if own is not None:
            node.segments.seal(own.key)
        for rank, text in enumerate(problems):
            if text:
                raise TransportError(
                    f"rank {rank} has no shared memory for the records of a graph: {text}"
                )
        view = memoryview(bytearray(nbytes)) if memory is None else memoryview(memory)
        return view.cast("Q")
