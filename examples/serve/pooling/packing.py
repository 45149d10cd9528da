"""Choose which texts are computed together: those whose padded length is the same.

The oldest text goes first, with others of its length behind it, up to what a batch holds. So nobody
starves, and no text is padded to a longer one's length.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..requests import ERROR, End, Request
from .work import PooledText, PoolingEngine, Texts, Vectors


@dataclass(frozen=True, eq=False)
class PoolingTicket:
    """Work in flight, and the ids of its requests."""

    work: Texts
    ids: tuple[int, ...]


@dataclass
class PoolingCounts:
    """Counts since the start."""

    batches: int = 0
    texts: int = 0
    tokens: int = 0


class PoolingScheduler:
    """The requests of one engine.

    Args:
        in_flight: batches at a time.
    """

    def __init__(self, engine: PoolingEngine, in_flight: int) -> None:
        self._limits, self._rows, self._tokens = engine.limits, engine.rows, engine.tokens
        self._budget, self._in_flight = engine.budget, in_flight
        # By the padded length, in the order of arrival, as all dicts are.
        self._queues: dict[int, dict[int, Request]] = {tokens: {} for tokens in self._tokens}
        self._running: dict[int, Request] = {}
        self._flying = 0
        self.stats = PoolingCounts()
        self.vectors: list[tuple[int, bytes]] = []
        self.ends: list[End] = []

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return sum(map(len, self._queues.values()))

    @property
    def running(self) -> int:
        """How many requests are computed."""
        return len(self._running)

    @property
    def is_idle(self) -> bool:
        """True if there are no requests."""
        return not self._running and not self.waiting

    def add(self, request: Request) -> None:
        """Let a request wait for its turn; ids ascend.

        Raises:
            ValueError: the engine cannot serve it; the front checks this before.
        """
        length, limits = len(request.prompt), self._limits
        if not 0 < length <= limits.context:
            raise ValueError(f"{length} tokens of at most {limits.context}")
        if min(request.prompt) < 0 or max(request.prompt) >= limits.vocabulary:
            raise ValueError(f"a token is not below {limits.vocabulary}")
        self._queues[self._padded(length)][request.id] = request

    def cancel(self, id_: int) -> None:
        """Forget a request, wherever it is; unknown ids have ended."""
        self._running.pop(id_, None)
        for queue in self._queues.values():
            queue.pop(id_, None)

    def schedule(self) -> Iterator[PoolingTicket]:
        """Give all work that can be submitted now."""
        while self._flying < self._in_flight and (
            queues := [q for q in self._queues.values() if q]
        ):
            oldest = min(queues, key=lambda queue: next(iter(queue)))
            yield self._pack(oldest)

    def complete(self, ticket: PoolingTicket, vectors: Vectors) -> None:
        """Take the vectors of a batch."""
        self._flying -= 1
        for id_, vector in zip(ticket.ids, vectors, strict=True):
            if self._running.pop(id_, None) is not None:
                self.vectors.append((id_, np.ascontiguousarray(vector, np.float32).tobytes()))
                self.ends.append(End(id_, "stop", 0))

    def fail(self, ticket: PoolingTicket, message: str) -> None:
        """End the requests of work that has failed, and nobody else's."""
        self._flying -= 1
        for id_ in ticket.ids:
            if self._running.pop(id_, None) is not None:
                self.ends.append(End(id_, ERROR, 0, message))

    def _padded(self, length: int) -> int:
        return self._tokens[bisect_left(self._tokens, length)]

    def _pack(self, queue: dict[int, Request]) -> PoolingTicket:
        """The oldest texts of a queue, as many as a batch holds."""
        tokens = self._padded(len(next(iter(queue.values())).prompt))
        most = max(1, min(self._rows[-1], self._budget // tokens))
        ids = tuple(id_ for id_, _ in zip(queue, range(most), strict=False))
        requests = [queue.pop(id_) for id_ in ids]
        self._running.update(zip(ids, requests, strict=True))
        self._flying += 1
        self.stats.batches += 1
        self.stats.texts += len(ids)
        self.stats.tokens += sum(len(request.prompt) for request in requests)
        texts = tuple(PooledText(request.prompt, request.second) for request in requests)
        return PoolingTicket(Texts(texts), ids)


def lengths(longest: int, first: int = 16) -> tuple[int, ...]:
    """Padded lengths up to the longest, each twice the one before."""
    usual = list[int]()
    while first < longest:
        usual.append(first)
        first *= 2
    return (*usual, longest)


def row_counts(budget: int, shortest: int, most: int | None) -> Sequence[int]:
    """Numbers of texts of a batch: powers of two, up to what its tokens or `most` allow."""
    largest = max(1, budget // shortest) if most is None else most
    return lengths(largest, 1)
