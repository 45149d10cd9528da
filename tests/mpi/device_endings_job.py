"""Steps on devices that come to a bad end, each in its way; they must end the whole job.

    mpiexec -n 2 python -m tests.mpi.device_job tests.mpi.device_endings_job ENDING

The last rank goes wrong, in a method, when the others have replayed what they have captured.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch

import cg
from cg.ir.attributes import Stream
from cg.launch.world import world as worlds

TIMEOUT = 3.0
"""Seconds that a step may take."""

LONG = 30.0
"""Seconds; far more than a test waits."""

STEPS, BAD = 8, 5


def kill() -> None:
    """The process is gone."""
    os.kill(os.getpid(), signal.SIGKILL)


def sleep() -> None:
    """The host does not come to send a message."""
    time.sleep(LONG)


def stall() -> None:
    """The host goes on, but its device does not come to what is put on it now."""
    world: Any = worlds.world()
    if world.device.kind == "cuda":
        torch.cuda._sleep(int(LONG * 2e9))  # cycles
        return
    stream = world.device.stream(Stream.SEND)
    for queue in (stream, stream.branch):  # of graphs
        queue.put("stall", lambda: time.sleep(LONG))


ENDINGS = {"kill": kill, "sleep": sleep, "stall": stall}


@cg.actor
class Part(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @cg.opaque(fake=lambda self, x, number: torch.empty_like(x))
    def check(self, x: torch.Tensor, number: int) -> torch.Tensor:
        if number == BAD:
            print(f"it begins to {sys.argv[1]}", flush=True)
            ENDINGS[sys.argv[1]]()
        return x + 1


def main() -> None:
    last = cg.world_size() - 1
    parts = [Part.on(rank)() for rank in range(cg.world_size())]

    @cg.trace
    def step(x: torch.Tensor, number: int) -> torch.Tensor:
        return parts[0].forward(parts[last].forward(parts[last].check(parts[0].forward(x), number)))

    # The rank that goes wrong has all the time, so that it is not the one that gives up.
    timeout = 10 * LONG if cg.rank() == last else TIMEOUT
    x = torch.ones(1 << 16)
    compiled = step.lower(x, cg.object).compile(timeout=timeout)
    for number in range(STEPS):
        out = compiled(x, number)
        assert out[0].item() == 12.0, out
    raise AssertionError("nobody has noticed")


if __name__ == "__main__":
    main()
