"""Programs that drive a graph from rank 0 and end while it is open, each in its way.

    mpiexec -n 4 python tests/mpi/endings_job.py ENDING [ARGUMENT]

ARGUMENT says to `dies`, `driver_dies` and `dies_in_step` how, and to `waits` which file shows that
it does.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from driving import chain_of

import cg

torch.set_num_threads(1)


class Boom(Exception):
    """A user's exception, whose constructor does not take its `args`."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what} ({code})")
        self.code = code


def leave_quietly() -> None:
    sys.exit()


@cg.actor
class Worker:
    """Goes wrong if it is asked to."""

    def __init__(self, tag: str) -> None:
        self.tag = tag

    def echo(self, x: Any) -> Any:
        return x

    def fail(self, x: Any) -> Any:
        if x == "boom":
            raise Boom(f"{self.tag} got {x!r}", 7)
        return x

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def leave(self, how: Any) -> Any:
        if how == "exit":
            sys.exit(5)
        if how == "raise":
            raise SystemExit(6)
        if how == "leave":
            leave_quietly()
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "kill":
            os.kill(os.getpid(), 9)
        return how


def workers() -> list[Any]:
    return [Worker.on(rank)(f"w{rank}") for rank in range(1, cg.world_size())]


def exits(drives: bool) -> None:
    """The driver ends without closing; nobody hangs."""
    graph = chain_of(workers())
    if not drives:
        graph.serve()
        return
    assert graph.execute(1).result(timeout=30) == 1
    graph.execute(2)  # dropped


def forgets(drives: bool) -> None:
    """A rank ends instead of serving."""
    graph = chain_of(workers())
    if cg.rank() == 1:
        return
    if not drives:
        graph.serve()
        return
    graph.execute(1).result(timeout=60)


def dies(drives: bool) -> None:
    """A method ends its process by force."""
    graph = chain_of(workers(), "leave")
    if not drives:
        graph.serve()
        return
    assert graph.execute("stay").result(timeout=30) == "stay"
    graph.execute(sys.argv[2]).result(timeout=60)


def driver_dies(drives: bool) -> None:
    """The same on the rank that drives."""
    graph = chain_of([Worker.on(0)("w0"), *workers()], "leave")
    if not drives:
        graph.serve()
        return
    graph.execute(sys.argv[2]).result(timeout=60)


def dies_in_step(drives: bool) -> None:
    """The same on rank 1, in a step that all ranks run together."""
    (worker,) = workers()

    @cg.trace
    def step(how: Any) -> Any:
        return worker.leave(how)

    step.lower(cg.object).compile()(sys.argv[2])


def throws(drives: bool) -> None:
    """The driver does not catch what a method raises."""
    graph = chain_of(workers(), "fail")
    if not drives:
        graph.serve()
        return
    graph.execute("boom").result(timeout=60)


def waits(drives: bool) -> None:
    """Everybody waits, for Ctrl-C."""
    graph = chain_of(workers(), "sleep")
    if not drives:
        graph.serve()
        return
    future = graph.execute(60.0)
    Path(sys.argv[2]).write_text("waiting")
    future.result()


if __name__ == "__main__":
    globals()[sys.argv[1]](cg.rank() == 0)
