"""The executions of a virtual world, all of whose ranks one process plays."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..driven.commands import VirtualCommands
from ..driven.executions import Executions
from ..driven.futures import Future
from ..errors import DeadlockError
from ..failures.flight import ASKING, FlightRecord, where_ranks_are


class VirtualWaiting:
    """The waiting of one process that plays all ranks: if nothing moves, nothing ever will.

    It implements `Waiting`, which describes the methods.
    """

    def pause(self, polls: int, seconds: float | None) -> None:
        """Raise DeadlockError if nothing moves."""
        if polls > 1000:  # a shuffled turn may leave out those that could move
            raise DeadlockError("deadlock: no execution in flight can go on")

    def rest(self) -> None:
        """Nobody else waits for the core."""

    def where(
        self,
        ranks: Sequence[int],
        records: Sequence[FlightRecord] = (),
        seconds: float = ASKING,
    ) -> str:
        return where_ranks_are(records)

    def serving(self) -> AbstractContextManager[object]:
        return nullcontext()

    def watch(self, turn: Callable[[], bool], future: Future) -> Generator[Any, None, None]:
        while not future.is_done:
            turn()
            yield


class VirtualRestartEpochs:
    """The `RestartEpochs` of one process that plays all ranks."""

    def __init__(self) -> None:
        self.mine = 0
        self._number = 0

    def reach(self, epoch: int) -> None:
        self.mine = epoch

    def missing(self, epoch: int) -> list[int]:
        return []

    def is_wanted(self, driver: int) -> bool:
        return False

    def tell(self, number: int) -> None:
        self._number = number

    def told(self, driver: int) -> int:
        return self._number


def virtual_executions(size: int, shuffle: random.Random | None = None) -> Executions:
    """The executions of a virtual world."""
    return Executions(
        range(size),
        lambda driver: VirtualCommands(),
        VirtualWaiting(),
        VirtualRestartEpochs(),
        shuffle,
    )
