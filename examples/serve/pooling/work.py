"""Work of the engine of a model that pools: texts that are padded to one length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..requests import Limits

# Columns of a batch, int64 [rows, IDS + tokens]: tokens of the row without padding, where the
# second text of a pair begins (0: there is none), and the ids.
LENGTH, SECOND = range(2)
IDS = 2

Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class PooledText:
    """A text, or a pair of texts as one.

    Attributes:
        second: where the second text begins, as its type tells; 0: there is none.
    """

    tokens: Sequence[int]
    second: int = 0


@dataclass(frozen=True)
class Texts:
    """Texts that are computed together."""

    texts: tuple[PooledText, ...]


class PooledResult(Protocol):
    """The vectors of a batch."""

    def done(self) -> bool: ...
    def when_done(self, call: Callable[[], None]) -> None: ...
    def vectors(self) -> Vectors:
        """Float32 [texts, width]; what the execution has raised."""


class PoolingEngine(Protocol):
    """The engine, as a scheduler knows it.

    Attributes:
        rows, tokens: sizes of batches that are compiled, ascending.
        budget: tokens of a batch at most, with padding; a text may have more alone.
        longest_slice: the most seconds that `improve` has taken.
    """

    limits: Limits
    longest_slice: float
    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    budget: int

    def submit(self, work: Texts) -> PooledResult: ...
    def due(self, idle: bool) -> bool: ...
    def improve(self) -> bool: ...
    def when_ready(self, call: Callable[[], None]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class PoolingSize:
    """Batches of up to `rows` texts of up to `tokens` tokens."""

    rows: int
    tokens: int

    def holds(self, needed: PoolingSize) -> bool:
        return self.rows >= needed.rows and self.tokens >= needed.tokens

    @property
    def cost(self) -> tuple[int, ...]:
        return self.rows * self.tokens, self.rows

    def __str__(self) -> str:
        return f"batches of {self.rows} texts of {self.tokens} tokens"

    def padding(self, token: int) -> NDArray[np.int64]:
        """Rows of padding, each a text of one token.

        Args:
            token: of padding.
        """
        numbers = np.full((self.rows, IDS + self.tokens), token, np.int64)
        numbers[:, LENGTH], numbers[:, SECOND] = 1, 0
        return numbers

    def example(self, token: int) -> tuple[Any, ...]:
        """The arguments of a graph, of padding alone."""
        import torch  # which a scheduler of texts runs without

        return (torch.from_numpy(self.padding(token)),)
