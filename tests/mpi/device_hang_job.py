"""A device does not end an execution although the host has put all of it there.

    mpiexec -n 2 python -m tests.mpi.device_job tests.mpi.device_hang_job [behind | driven]

The fake device computes on the host's thread, so its events stand for what hangs: rank 0 never sees
one that is passed.
"""

from __future__ import annotations

import sys
import time

import torch

import cg
from cg.backends.fake.queues import FakeEvent


@cg.actor
class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w


def hang() -> None:
    """From now on the device passes no event, as far as this rank's host can see."""
    FakeEvent.query = lambda self: False  # type: ignore[method-assign]


def main() -> None:
    a, b = Scale.on(0)(), Scale.on(1)()
    x = torch.ones(4)
    if "driven" in sys.argv:

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def driven(x: torch.Tensor) -> torch.Tensor:
            return a.forward(b.forward(x))

        graph = driven.lower(x).compile(timeout=3, passes="-capture")
        if cg.rank():
            graph.serve()
            return
        hang()
        graph.execute(x).result(timeout=20)
    else:

        @cg.trace
        def step(x: torch.Tensor) -> torch.Tensor:
            return a.forward(b.forward(x))

        compiled = step.lower(x).compile(timeout=3)
        for _ in range(4 if "behind" in sys.argv else 0):
            compiled(x)
        if not cg.rank():
            hang()
        compiled(x)
    time.sleep(60)
    raise AssertionError("nobody has noticed")


if __name__ == "__main__":
    main()
