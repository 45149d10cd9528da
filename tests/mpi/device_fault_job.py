"""A GPU is asked for a row that is not there. It finds that out when the host has gone on.

mpiexec -n 2 python -m tests.mpi.device_fault_job
"""

from __future__ import annotations

import time

import torch

import cg


@cg.actor
class Table(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(torch.ones(4, 2))

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(at, self.rows)

    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def main() -> None:
    table, other = Table.on(0)(), Table.on(1)()

    @cg.trace
    def step(at: torch.Tensor) -> torch.Tensor:
        return other.double(table.forward(at))

    compiled = step.lower(torch.zeros(3, dtype=torch.long)).compile(timeout=20)
    compiled(torch.arange(3))
    compiled(torch.arange(3) + 9)
    time.sleep(10)
    raise AssertionError("nobody has noticed")


if __name__ == "__main__":
    main()
