"""Ranks as forked processes, each with an NPU of the stand-in, and with the mock between them."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cg.backends.devices import find
from cg.backends.hccl.library import HcclLibrary
from cg.backends.hccl.pool import HcclPool
from cg.backends.hccl.symbols import load
from cg.ir.attributes import Stream

from ...mpi.jobs import ROOT
from .build import STANDIN

PATIENCE = 120.0
_fork: Any = multiprocessing.get_context("fork")


@dataclass
class PipeWorld:
    """A `World` whose ranks are processes, with a pipe to each."""

    rank: int
    size: int
    boxes: Any
    device: Any = None
    is_virtual: bool = False
    round: int = 0
    early: list[Any] = field(default_factory=list)

    def allgather(self, value: Any) -> list[Any]:
        self.round += 1
        for box in self.boxes:
            box.put((self.round, self.rank, value))
        found: dict[int, Any] = {}
        while len(found) < self.size:
            late = [each for each in self.early if each[0] == self.round]
            message = late[0] if late else self.boxes[self.rank].get()
            if late:
                self.early.remove(message)
            if message[0] == self.round:
                found[message[1]] = message[2]
            else:
                self.early.append(message)
        return [found[rank] for rank in range(self.size)]

    def barrier(self) -> None:
        self.allgather(None)


class Rank:
    """The state of one process.

    Attributes:
        device: made by the code that real NPUs are made by.
    """

    def __init__(self, world: PipeWorld, path: Path) -> None:
        self.world: Any = world
        self.rank = world.rank
        self.size = world.size
        self.symbols = load(str(path))
        self.device = world.device = find.make("npu", world.rank)
        self.library = HcclLibrary(self.symbols, self.device, world.rank)

    def pool(self, grace: float = 1.0) -> HcclPool:
        """The communicators of this process, none yet."""
        return HcclPool(self.world, self.device, self.library, grace)

    def comm(self) -> Any:
        """A communicator of all ranks."""
        key = self.library.unique_id() if self.rank == 0 else b""
        return self.library.connect(self.size, self.world.allgather(key)[0], self.rank)

    def stream(self, kind: Stream = Stream.MESSAGE) -> Any:
        return self.device.stream(kind)


@dataclass(frozen=True)
class Raised:
    """The exception that a rank has raised."""

    kind: str
    text: str


def on_ranks(
    size: int,
    path: Path,
    job: Callable[[Rank], Any],
    variables: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `job` on each of so many ranks; the results, or `Raised`."""
    boxes = [_fork.SimpleQueue() for _ in range(size)]
    ends = [_fork.Pipe(duplex=False) for _ in range(size)]
    processes = [
        _fork.Process(target=_play, args=(PipeWorld(rank, size, boxes), path, job, out, variables))
        for rank, (_, out) in enumerate(ends)
    ]
    for process in processes:
        process.start()
    try:
        return [_received(into) for into, _ in ends]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _received(into: Any) -> Any:
    assert into.poll(PATIENCE), "a rank is stuck"
    return pickle.loads(into.recv_bytes())


def _play(world: PipeWorld, path: Path, job: Any, out: Any, variables: Any) -> None:
    os.environ.update({"HCCL_SO_PATH": str(path), "HCCL_EXEC_TIMEOUT": "10", **(variables or {})})
    sys.path[:0] = [str(STANDIN), str(ROOT)]
    try:
        importlib.import_module("torch_npu")
        result = job(Rank(world, path))
    except BaseException as error:
        traceback.print_exc()
        result = Raised(type(error).__name__, str(error))
    out.send_bytes(pickle.dumps(result))
    world.boxes[world.rank].get()  # stay until the parent ends this process: others may still read
