"""Programs one rank of which hangs, each in one way, as a user would write them.

    mpiexec -n 3 python tests/mpi/hang_job.py SCENARIO[,SCENARIO...] FILE

A rank says what it has seen as a line of JSON, after its number. In most scenarios rank 1 hangs
until the others have been told: they hold a lock of FILE, which it waits for. It writes to FILE in
which scenario it hangs; deadlines begin then, but in a step, which it would not begin alone.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import cg

torch.set_num_threads(1)

GATE = os.open(sys.argv[2], os.O_RDWR)
"""The file with the lock."""

DEADLINE = 3.0
"""Seconds until a rank is told; steps of some milliseconds have the same."""

ALONE, AT_ONCE = fcntl.LOCK_EX, fcntl.LOCK_EX | fcntl.LOCK_NB
"""Waits for the lock, and does not."""

KEEPER = ctypes.PyDLL(None)
"""Its functions keep the interpreter's lock."""


def hangs() -> None:
    """Say that this rank's next line hangs."""
    os.pwrite(GATE, f"{scenario:30}".encode(), 0)


def await_hang() -> None:
    """Wait until a rank hangs in this scenario."""
    until = time.monotonic() + 60
    while os.pread(GATE, 30, 0) != f"{scenario:30}".encode():
        assert time.monotonic() < until, "no rank hangs"
        time.sleep(0.001)


@cg.actor
class HangingStage(nn.Module):
    """Methods that hang, each in a way of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def asleep(self, x: Tensor) -> Tensor:
        if x[0] > 0:
            hangs()
            fcntl.flock(GATE, ALONE)  # asleep here
        fcntl.flock(GATE, fcntl.LOCK_UN)
        return x.clone()

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def busy(self, x: Tensor) -> Tensor:
        if x[0] > 0:
            hangs()
        while x[0] > 0 and KEEPER.flock(GATE, AT_ONCE) != 0:  # busy here
            pass
        fcntl.flock(GATE, fcntl.LOCK_UN)
        return x.clone()

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def keeping(self, x: Tensor) -> Tensor:
        if x[0] > 0:
            hangs()
            KEEPER.flock(GATE, ALONE)  # the lock is kept here
        fcntl.flock(GATE, fcntl.LOCK_UN)
        return x.clone()

    @cg.opaque
    def late(self, x: Any) -> Any:
        if x:
            hangs()
            time.sleep(3600)  # for ever
        return x


def say(**what: Any) -> None:
    """Report to the test, in one piece."""
    sys.stdout.write(f"rank {cg.rank()} in {scenario}: {json.dumps(what)}\n")
    sys.stdout.flush()


@contextmanager
def told() -> Iterator[None]:
    """Hold the lock until this rank has been told, and say what that is."""
    if cg.rank() != 1:
        fcntl.flock(GATE, fcntl.LOCK_SH)
    try:
        yield
    except cg.StepTimeout as error:
        say(message=str(error))
    finally:
        fcntl.flock(GATE, fcntl.LOCK_UN)


first, second, third = (HangingStage.on(rank)() for rank in range(3))
X = torch.zeros(2)


def stepwise(method: str) -> None:
    def step(x: Tensor) -> Tensor:
        h = first.forward(x)
        h = getattr(second, method)(x) + h  # the line that calls
        return third.forward(h)

    compiled = cg.trace(step).lower(X).compile(timeout=DEADLINE)
    compiled(X)
    with told():
        cg.barrier()  # after which all others hold the lock
        compiled(X + 1)
    assert torch.equal(compiled(X), torch.full((2,), 2.0))


def asleep() -> None:
    """Rank 1 sleeps in a method of a step that all ranks run."""
    stepwise("asleep")


def busy() -> None:
    """It runs Python there."""
    stepwise("busy")


def keeping() -> None:
    """A C function keeps the interpreter's lock there."""
    stepwise("keeping")


def between(wait: Any) -> None:
    compiled = cg.trace(lambda x: third.forward(second.forward(first.forward(x))))
    step = compiled.lower(X).compile(timeout=DEADLINE)
    step(X)
    with told():
        cg.barrier()
        if cg.rank() == 1:
            hangs()
            wait(GATE, ALONE)  # between two steps
        else:
            await_hang()
        step(X)


def outside() -> None:
    """Rank 1 does not come to the next step."""
    between(fcntl.flock)


def outside_keeping() -> None:
    """The same, and it keeps the interpreter's lock."""
    between(KEEPER.flock)


def driven(method: str) -> None:
    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def step(x: Tensor) -> Tensor:
        h = getattr(second, method)(first.forward(x))  # the line that calls
        return third.forward(h)

    with step.lower(X).compile() as graph:
        if cg.rank() == 0:
            graph.execute(X - 1).result()
            with told():
                future = graph.execute(X)
                await_hang()
                future.result(timeout=DEADLINE)
            assert torch.equal(future.result(), torch.full((2,), 2.0))


def driven_asleep() -> None:
    """Rank 1 sleeps in a method of a graph."""
    driven("asleep")


def driven_busy() -> None:
    """It runs Python there."""
    driven("busy")


def driven_keeping() -> None:
    """A C function keeps the interpreter's lock there."""
    driven("keeping")


def absent() -> None:
    """Rank 1 does not come to `serve` in time."""

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def step(x: Tensor) -> Tensor:
        return second.forward(x)

    graph = step.lower(X).compile()
    if cg.rank() == 0:
        with told():
            cg.barrier()
            await_hang()
            future = graph.execute(X)
            future.result(timeout=DEADLINE)
    else:
        cg.barrier()
    if cg.rank() == 1:
        hangs()
        fcntl.flock(GATE, ALONE)  # before it serves
        fcntl.flock(GATE, fcntl.LOCK_UN)
    with graph:
        if cg.rank() == 0:
            future.result()


def stopped() -> None:
    """The process of rank 1 is stopped, and stays so."""
    compiled = cg.trace(lambda x: third.forward(second.forward(first.forward(x))))
    step = compiled.lower(X).compile(timeout=DEADLINE)
    if cg.rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    step(X)


def make_late(**options: Any) -> Any:
    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def step(x: Any) -> Any:
        return second.late(x)

    return step.lower(cg.object).compile(**options)


def closing() -> None:
    """The block's end waits for a method that never returns."""
    with make_late(timeout=DEADLINE) as graph:
        if cg.rank() == 0:
            graph.execute(0).result()
            future = graph.execute(1)
            await_hang()
            future.result(timeout=0.5)


def forgetting() -> None:
    """The same, and nobody asks for the result."""
    with make_late(timeout=DEADLINE) as graph:
        if cg.rank() == 0:
            graph.execute(1)
            await_hang()


def catching() -> None:
    """The program catches it, and comes to its end."""
    try:
        closing()
    except cg.StepTimeout as error:
        say(message=str(error))


def exiting() -> None:
    """The program ends without closing the graph."""
    graph = make_late(timeout=DEADLINE)
    if cg.rank() == 0:
        graph.execute(1)
        await_hang()
    else:
        graph.serve()


def barrier() -> None:
    """Rank 1 does not come to a barrier."""
    if cg.rank() == 1:
        time.sleep(3600)  # before the barrier
    try:
        cg.barrier()
    except (TimeoutError, RuntimeError) as error:
        say(message=str(error))
        raise


if __name__ == "__main__":
    for scenario in sys.argv[1].split(","):
        globals()[scenario]()
