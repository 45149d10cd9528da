"""A device is asked for a row that is not there. It finds that out when the host has gone on.

    mpiexec -n 2 python -m tests.mpi.device_fault_job HOW
    mpiexec -n 2 python -m tests.mpi.device_job tests.mpi.device_fault_job HOW

HOW is where the host learns of it: nowhere (`watched`), where the program reads a number (`read`),
as it begins another execution (`again`), in a method that reads a number (`within`), or in one of a
driven graph (`driven`). A fake device computes on the host, so it fails when it is told to.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

import cg
from cg.launch.world.world import world
from tests.backends.devices.patience import ASSERTED


@cg.actor
class Table(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(torch.ones(4, 2))

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(at, self.rows)  # the line to be named

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def read(self, x: torch.Tensor) -> torch.Tensor:
        read(x)
        return x.clone()

    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


FAKE: Any = world().device if "fake" in type(world().device).__name__.lower() else None
BAD = torch.arange(3) + (0 if FAKE else 9)
"""Rows that are not there. For a fake device, which would raise at once, they are."""
FAILS: list[bool] = []
"""Not empty once the device is to fail."""


def read(x: torch.Tensor) -> float:
    """A number of the device, which raises if that has failed."""
    if FAKE and FAILS:
        FAKE.fail(ASSERTED)
        FAKE.check()
    return float(x.sum())


def main() -> None:
    how = sys.argv[1]
    table, other = Table.on(0)(), Table.on(1)()
    at = torch.arange(3)

    if how == "driven":

        @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
        def driven(at: torch.Tensor) -> torch.Tensor:
            return table.read(other.double(table.forward(at)))

        graph = driven.lower(at).compile(timeout=20)
        if cg.rank():
            graph.serve()
            return
        read(graph.execute(at).result())
        FAILS.append(True)
        graph.execute(BAD).result()
    else:

        @cg.trace
        def step(at: torch.Tensor) -> torch.Tensor:
            rows = table.forward(at)
            return other.double(table.read(rows) if how == "within" else rows)

        compiled = step.lower(at).compile(timeout=20)
        compiled(at)
        if cg.rank() == 0:
            FAILS.append(True)
        result = compiled(BAD)
        if FAKE and FAILS:
            FAKE.fail(ASSERTED)
        if how == "read":
            read(result)
        while how == "again":
            compiled(at)
    time.sleep(10)
    raise AssertionError("nobody has noticed")


if __name__ == "__main__":
    main()
