"""Large messages in memory of their own, lent to the receiver for as long as its value is used.

The sender writes such a message into a segment, and does not touch the segment again before the
receiver has given it back. The receiver makes its value in place, without a copy. It gives the
memory back when nothing refers to it any more: arrays, tensors, or views of them. A value that a
user keeps is therefore never overwritten. Where a lane has lent as much as it may, messages are
copied instead.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import numpy as np

from ...errors import TransportError
from ..node import Node
from .layout import LINE, round_up
from .segments import Segment

LIMIT: Final = 2
"""Segments of one lane: one to write to while the last value is still in use. More would be lent
only to those who keep what they get, and copies suit them as well."""

_RETURNED: Final = 0  # word of a segment: how often its receiver has given it back
_INDEX_BITS: Final = 8
_SPARE: Final = 1 << 20
_MANY: Final = 4


class Loan:
    """A segment of a sender's.

    Attributes:
        name: tells it from all others of the lane; the lowest bits say which of its places it has.
        key: of the segment.
        memory: all of it; a message begins at byte `LINE`.
        lent: how often it has been lent.
    """

    __slots__ = ("_returned", "_segment", "key", "lent", "memory", "name", "sealed")

    def __init__(self, segment: Segment, name: int) -> None:
        self._segment = segment
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
        """Whether the receiver has given it back."""
        return self._returned[_RETURNED] == self.lent


class Lender:
    """The segments that one sending lane lends.

    Args:
        node: this machine.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._loans: list[Loan] = []  # the one lent last first: it is in the caches
        self._count = 0

    def find(self, nbytes: int) -> Loan | None:
        """A free segment for a message; None if all are lent, or the machine has no memory left."""
        fallow = None
        for loan in self._loans:
            if not loan.is_free:
                continue
            if nbytes <= loan.room <= max(_MANY * nbytes, _SPARE):
                return loan
            fallow = loan
        if fallow is None and len(self._loans) == LIMIT:
            return None
        try:
            segment = self._node.segments.create(round_up(LINE + nbytes, 4096))
        except OSError:
            return None
        place = len(self._loans)
        if len(self._loans) == LIMIT and fallow is not None:
            place = fallow.name & ((1 << _INDEX_BITS) - 1)
            self._withdraw(fallow)
        self._count += 1
        loan = Loan(segment, self._count << _INDEX_BITS | place)
        self._loans.insert(0, loan)
        return loan

    def lend(self, loan: Loan) -> int:
        """The message is written: the segment is the receiver's until it gives it back.

        Returns:
            The number of this lending.
        """
        if loan.lent and not loan.sealed:
            # The receiver has opened it; a descriptor less.
            self._node.segments.seal(loan.key)
            loan.sealed = True
        loan.lent += 1
        if self._loans[0] is not loan:
            self._loans.remove(loan)
            self._loans.insert(0, loan)
        return loan.lent

    def close(self) -> None:
        """Let go of all segments; those that are lent live on with who uses them."""
        while self._loans:
            self._withdraw(self._loans[-1])

    def _withdraw(self, loan: Loan) -> None:
        if not loan.sealed:
            self._node.segments.seal(loan.key)
        self._loans.remove(loan)


class Borrower:
    """The segments that one receiving lane has been lent.

    Args:
        node: this machine.
        sender: the rank that lends.
    """

    def __init__(self, node: Node, sender: int) -> None:
        self._node = node
        self._sender = sender
        self._known: dict[int, tuple[int, memoryview, memoryview]] = {}
        self._used: dict[tuple[int, int], weakref.ref[Any]] = {}

    def borrow(self, name: int, key: int, nbytes: int, number: int) -> memoryview:
        """The memory of a loan with a message in it; given back when nobody refers to it any more.

        Args:
            name, key: of the loan.
            nbytes: of the segment.
            number: of this lending.

        Raises:
            TransportError: the segment cannot be opened.
        """
        index = name & ((1 << _INDEX_BITS) - 1)
        known = self._known.get(index)
        if known is None or known[0] != name:
            known = self._known[index] = (name, *self._open(key, nbytes))
        _, memory, words = known
        owner = np.frombuffer(memory, dtype=np.uint8)
        order, used = self._node.order, self._used

        def give_back(gone: weakref.ref[Any]) -> None:
            if order is not None:
                order()
            words[_RETURNED] = number
            del used[name, number]

        used[name, number] = weakref.ref(owner, give_back)
        return owner.data

    def close(self) -> None:
        """Forget all segments; what is in use lives on."""
        self._known.clear()

    def _open(self, key: int, nbytes: int) -> tuple[memoryview, memoryview]:
        try:
            mapped = self._node.segments.open(self._node.pids[self._sender], key, nbytes)
        except OSError as error:
            raise TransportError(
                f"a message of rank {self._sender} cannot be opened; has it ended? {error}"
            ) from error
        memory = memoryview(mapped)
        return memory, memory[:LINE].cast("Q")
