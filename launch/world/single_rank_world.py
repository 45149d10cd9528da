"""The world of one rank that has a device: this process alone, without MPI."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import TypeVar

from ...backends.cpu.control.control import Control
from ...backends.device import Device
from ...backends.failures.flight import Activity, Sight

T = TypeVar("T")


class SingleRankWorld:
    """A world of one rank, whose programs run on its device as they would under MPI.

    The virtual world plays ranks on the host, one after the other, and knows no devices. This one
    is for a program on one accelerator, which is started by plain `python`.

    Attributes:
        rank, size, nodes: of the only rank.
        comm: None; there is nobody to talk to.
        device: of the rank.
    """

    is_virtual = False
    rank = 0
    size = 1
    nodes: Sequence[int] = (0,)
    comm = None

    def __init__(self, device: Device) -> None:
        self.device: Device | None = device
        self._ending = Lock()

    def plays(self, rank: int) -> bool:
        """True for rank 0."""
        return rank == 0

    def broadcast(self, value: T | None, root: int) -> T:
        """`value` itself.

        Raises:
            ValueError: the root is another rank.
        """
        if root != 0:
            raise ValueError(f"broadcast: root {root} is not a rank of 1")
        return value  # type: ignore[return-value] # the root gives a value

    def allgather(self, value: T) -> list[T]:
        """`value` alone."""
        return [value]

    def barrier(self) -> None:
        """Return at once, since there is nobody to wait for."""

    def end_job(self, message: str) -> None:
        """End this process at once, from any thread: its own may wait for the device for ever.

        Where two threads have come upon the same failure, the first one says so.
        """
        self._ending.acquire()
        sys.stdout.flush()
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()
        os._exit(1)

    def observe(self, control: Control) -> None:
        """Do nothing, since no call waits."""

    def at_end(self, is_done: Callable[[], bool]) -> None:
        """Do nothing, since no rank waits for the end."""

    def answer_by(self, teller: Callable[[], Activity | None]) -> None:
        """Do nothing, since nobody asks."""

    def look(self, ranks: Sequence[int], seconds: float) -> Mapping[int, Sight]:
        """Return nothing, since there are no other ranks."""
        return {}
