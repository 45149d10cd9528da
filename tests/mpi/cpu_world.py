"""Worlds over mpi4py and over files, for programs that are ranks of a job."""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class TestWorld:
    """The ranks of a job; `nodes` pretends that they run on the machines of that number."""

    __test__ = False
    is_virtual = False
    device = None

    def __init__(self, comm: Any, nodes: Sequence[int]) -> None:
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.nodes = tuple(nodes)

    def plays(self, rank: int) -> bool:
        return rank == self.rank

    def broadcast(self, value: T | None, root: int) -> T:
        result: T = self.comm.bcast(value, root)
        return result

    def allgather(self, value: T) -> list[T]:
        result: list[T] = self.comm.allgather(value)
        return result

    def barrier(self) -> None:
        self.comm.Barrier()

    def at_end(self, is_done: Callable[[], bool]) -> None:
        """Nothing: MPI ends here without a meeting of all."""

    def answer_by(self, teller: Callable[[], object]) -> None:
        """Nobody asks."""

    def look(self, ranks: Sequence[int], seconds: float) -> dict[int, Any]:
        """Nobody answers."""
        return {}

    def observe(self, observer: object) -> None:
        """Calls are MPI's own, and nobody hears of them."""


class FileWorld(TestWorld):
    """Ranks that meet through files in a folder; there is no MPI, and nobody to end the job."""

    def __init__(self, folder: Path, rank: int, nodes: Sequence[int]) -> None:
        self.comm = None
        self.rank = rank
        self.size = len(nodes)
        self.nodes = tuple(nodes)
        self._folder = folder
        self._calls = 0

    def broadcast(self, value: T | None, root: int) -> T:
        found = self.allgather(value)[root]
        assert found is not None
        return found

    def allgather(self, value: T) -> list[T]:
        self._calls += 1
        mine = self._file(self.rank).with_suffix(".part")
        mine.write_bytes(pickle.dumps(value))
        mine.rename(self._file(self.rank))
        while not all(self._file(rank).exists() for rank in range(self.size)):
            time.sleep(0.001)
        return [pickle.loads(self._file(rank).read_bytes()) for rank in range(self.size)]

    def barrier(self) -> None:
        self.allgather(None)

    def _file(self, rank: int) -> Path:
        return self._folder / f"call-{self._calls}-{rank}.pickle"


def report(rank: int, scenario: str, value: Any) -> None:
    """Give a JSON value to the test, through a file: a launcher may lose what is printed."""
    Path(sys.argv[3], f"report-{scenario}-{rank}").write_text(json.dumps(value))
