"""Steps that are closed make room for the communicators of others.

    mpiexec -n 2 python -m tests.mpi.device_job tests.mpi.room_job

A rank may be in two here. What closed steps have captured has operations of theirs, and a fake
communicator, as one of NCCL, is not given up while a graph has any.
"""

from __future__ import annotations

import torch

import cg
from cg.backends.errors import BindError
from cg.backends.nccl.pool import NcclPool

from .driving import raises

X = torch.arange(8.0)
EXECUTIONS = 5
"""A program is captured in its third."""


@cg.actor
class Worker:
    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def main() -> None:
    NcclPool.limit = 2
    a, b = Worker.on(0)(), Worker.on(1)()

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        return a.double(b.double(a.double(x)))

    def both(x: torch.Tensor) -> torch.Tensor:
        return cg.all_reduce([a.double(x), b.double(x)], op="sum")[0]

    chain = cg.trace(outputs=cg.on(0))(there_and_back).lower(X).compile()
    for _ in range(EXECUTIONS):
        check(chain(X), 8 * X)
    with raises(BindError, "open ones hold 2 more ('there_and_back': 2)"):
        cg.trace(outputs=cg.on(0))(both).lower(X).compile()
    check(chain(X), 8 * X)
    chain.close()

    total = cg.trace(outputs=cg.on(0))(both).lower(X).compile()
    for _ in range(EXECUTIONS):
        check(total(X), 4 * X)
    total.close()

    driven = cg.trace(inputs=cg.on(0), outputs=cg.on(0))(there_and_back).lower(X).compile()
    if cg.rank() == 0:
        for _ in range(2 * EXECUTIONS):
            check(driven.execute(X).result(), 8 * X)
    driven.close()

    with cg.trace(outputs=cg.on(0))(both).lower(X).compile() as total:
        check(total(X), 4 * X)
    print(f"rank {cg.rank()}: there was room")


def check(found: torch.Tensor | None, expected: torch.Tensor) -> None:
    assert found is None or torch.equal(found.cpu(), expected), found


if __name__ == "__main__":
    main()
