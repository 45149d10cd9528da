"""The executions of a world all of whose ranks one process plays."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..driven.executions import Executions
from ..driven.futures import Future
from ..driven.records import VirtualRecords
from ..errors import DeadlockError
from ..failures.flight import Sight


class VirtualWaiting:
    """Where one process plays all ranks: if nothing moves, nothing ever will."""

    def pause(self, polls: int, seconds: float | None) -> None:
        """See `Waiting`.

        Raises:
            DeadlockError: nothing moves.
        """
        if polls > 1000:  # a shuffled turn may leave out those that could move
            raise DeadlockError("deadlock: no execution in flight can go on")

    def rest(self) -> None:
        """See `Waiting`."""

    def look(self, ranks: Sequence[int], seconds: float) -> Mapping[int, Sight]:
        """See `Waiting`."""
        return {}

    def serving(self) -> AbstractContextManager[object]:
        """See `Waiting`."""
        return nullcontext()

    def watch(self, turn: Callable[[], bool], future: Future) -> Generator[Any, None, None]:
        """See `Waiting`."""
        while not future.is_done:
            turn()
            yield


class VirtualStages:
    """Stages of one process that plays all ranks."""

    def __init__(self) -> None:
        self.mine = 0
        self._number = 0

    def reach(self, stage: int) -> None:
        """See `Stages`."""
        self.mine = stage

    def missing(self, stage: int) -> list[int]:
        """See `Stages`."""
        return []

    def is_wanted(self, driver: int) -> bool:
        """See `Stages`."""
        return False

    def tell(self, number: int) -> None:
        """See `Stages`."""
        self._number = number

    def told(self, driver: int) -> int:
        """See `Stages`."""
        return self._number


def virtual_executions(size: int, shuffle: random.Random | None = None) -> Executions:
    """The executions of a virtual world."""
    return Executions(
        range(size), lambda driver: VirtualRecords(), VirtualWaiting(), VirtualStages(), shuffle
    )
