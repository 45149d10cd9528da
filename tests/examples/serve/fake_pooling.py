"""An engine of plain Python for models that pool: a vector is a function of its text's tokens."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np

from examples.serve.pooling.work import Texts, Vectors
from examples.serve.requests import Limits

WIDTH = 4
POOLS = Limits(
    groups=1,
    slots=8,
    chunk=64,
    blocks=1,
    block_size=1,
    context=64,
    vocabulary=256,
    eos=(),
    width=WIDTH,
)
FAILS = 255
"""A text that begins with this token makes its batch fail."""


def vector_of(tokens: Sequence[int], second: int = 0, width: int = WIDTH) -> list[float]:
    """Made-up numbers of a text: float32 from -1 to 1, of no particular length."""
    name = repr(([int(token) for token in tokens], int(second))).encode()
    digest = blake2b(name, digest_size=2 * width).digest()
    return [float(np.float32(number)) for number in np.frombuffer(digest, "<i2") / 32768]


class FakeVectors:
    """Of one batch; callbacks are called when it has run."""

    def __init__(self, work: Texts) -> None:
        self.work, self.calls = work, list[Callable[[], None]]()
        self.is_done = False

    def done(self) -> bool:
        return self.is_done

    def when_done(self, call: Callable[[], None]) -> None:
        if self.is_done:
            call()
        else:
            self.calls.append(call)

    def vectors(self) -> Vectors:
        assert self.is_done, "asked before it was done"
        if any(text.tokens[0] == FAILS for text in self.work.texts):
            raise ValueError("a method has raised")
        return np.array(
            [vector_of(text.tokens, text.second) for text in self.work.texts], np.float32
        )


class FakePoolingEngine:
    """Runs batches in the order of submission, by `run_one`, or by itself in a loop of asyncio.

    Args:
        delay: seconds of a batch; None: only `run_one` runs any.
    """

    rows, tokens, budget, longest_slice = (1, 2, 4, 8), (16, 32, 64), 128, 0.0

    def __init__(self, limits: Limits = POOLS, delay: float | None = None) -> None:
        self.limits, self.delay = limits, delay
        self.queue: deque[FakeVectors] = deque()
        self.works: list[Texts] = []

    def due(self, idle: bool) -> bool:
        return False

    def improve(self) -> bool:
        raise AssertionError("nothing to improve")

    def when_ready(self, call: Callable[[], None]) -> None:
        pass

    def close(self) -> None:
        pass

    def submit(self, work: Texts) -> FakeVectors:
        lengths = [len(text.tokens) for text in work.texts]
        padded = next(tokens for tokens in self.tokens if tokens >= max(lengths))
        assert 0 < len(lengths) <= max(1, min(self.rows[-1], self.budget // padded))
        self.works.append(work)
        result = FakeVectors(work)
        self.queue.append(result)
        if self.delay is not None and len(self.queue) == 1:
            asyncio.get_running_loop().call_later(self.delay, self._tick)
        return result

    def _tick(self) -> None:
        self.run_one()
        if self.queue:
            asyncio.get_running_loop().call_later(self.delay or 0.0, self._tick)

    def run_one(self) -> None:
        """Run the oldest batch."""
        result = self.queue.popleft()
        result.is_done = True
        for call in result.calls:
            call()
