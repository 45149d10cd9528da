"""News about executions between machines: small pickled messages, for which nobody waits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from ..waiting.node import MachineNode


@dataclass(frozen=True, slots=True)
class BarrierReached:
    """All ranks of a machine have come to a barrier."""

    ranks: tuple[int, ...]
    barrier: int
    epoch: int
    digests: tuple[int, ...]
    """The digest of each rank's arguments."""


@dataclass(frozen=True, slots=True)
class Failed:
    """An execution has failed on a rank; `error` is None where another rank failed first."""

    rank: int
    epoch: int
    error: bytes | None
    refused: bool
    """Whether it failed before the rank began its program."""


@dataclass(frozen=True, slots=True)
class Status:
    """The position of a rank: the status words of its row, and what it does, in words."""

    rank: int
    words: tuple[int, ...]
    doing: str


@dataclass(frozen=True, slots=True)
class Goodbye:
    """A rank has ended; nothing comes from it after this."""

    rank: int


News = BarrierReached | Failed | Status


class NewsLink:
    """Carries news. Making one is collective."""

    def __init__(self, node: MachineNode) -> None:
        self._comm: Any = node.world.comm.Dup()
        self._far = tuple(rank for rank in range(node.size) if not node.is_local(rank))
        self._far_leaders = tuple(rank for rank in node.leaders if rank in self._far)
        self._sent: deque[Any] = deque()
        self._talking = set(self._far)

    def tell_leaders(self, news: News) -> None:
        """Send to one rank of every other machine."""
        self._send(news, self._far_leaders)

    def tell_all(self, news: News) -> None:
        """Send to every rank of every other machine."""
        self._send(news, self._far)

    def receive(self) -> list[News]:
        """The news that have come since the last call."""
        received = []
        while (message := self._comm.improbe()) is not None:
            news = message.recv()
            if isinstance(news, Goodbye):
                self._talking.discard(news.rank)
            else:
                received.append(news)
        while self._sent and self._sent[0].Test():
            self._sent.popleft()
        return received

    def part(self, rank: int) -> None:
        """Send the last message of this rank."""
        self._send(Goodbye(rank), self._far)

    def is_silent(self) -> bool:
        """Drop what still comes; return whether nothing is under way any more, either way.

        Every message must be received before MPI ends. A barrier of all ranks does not show that
        their earlier messages have arrived; the arrival of their last messages does.
        """
        self.receive()
        return not self._talking and not self._sent

    def _send(self, news: News | Goodbye, ranks: tuple[int, ...]) -> None:
        for rank in ranks:
            self._sent.append(self._comm.isend(news, rank))
