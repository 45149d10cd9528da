"""A traced line raises on a host, in a driven step whose messages nobody announces.

mpiexec -n 2 python -m tests.mpi.device_job tests.mpi.driven_fault_job
"""

from __future__ import annotations

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
    table, other = Table.on(1)(), Table.on(0)()

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def step(at: torch.Tensor) -> torch.Tensor:
        return other.double(table.forward(at))

    graph = step.lower(torch.zeros(3, dtype=torch.long)).compile(max_inflight=2)
    if cg.rank():
        graph.serve()
    else:
        graph.execute(torch.arange(3)).result(timeout=20)
        graph.execute(torch.arange(3) + 9).result(timeout=20)
    raise AssertionError("nobody has noticed")


if __name__ == "__main__":
    main()
