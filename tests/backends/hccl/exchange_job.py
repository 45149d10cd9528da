"""Two ranks give each other a tensor at once, in each step.

    mpiexec -n 2 python -m tests.backends.hccl.exchange_job [passes | driven]

An argument switches passes, as `CG_PASSES` does, or lets rank 0 drive the step as a graph.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

import cg
from cg.launch.environment.config import config


@cg.actor
class Part:
    """Gives a multiple of what it is given, and adds two things up."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def give(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    def add(self, mine: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return mine - other


def main() -> None:
    parts = [Part.on(rank)(10.0**rank) for rank in range(2)]

    @cg.trace
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ones = [cg.via(part.give(x), "hccl") for part in parts]
        found = [part.add(ones[rank], ones[1 - rank]) for rank, part in enumerate(parts)]
        return cg.via(found[0], "cpu"), cg.via(found[1], "cpu")

    x = torch.arange(4.0)
    if sys.argv[1:] == ["driven"]:
        drive(cg.trace(step.__wrapped__, inputs=cg.on(0), outputs=cg.on(0)), x)
        return
    compiled = step.lower(x).compile(passes=sys.argv[1] if len(sys.argv) > 1 else "")
    library = ctypes.CDLL(str(config().hccl_library))
    library.mockCalls.restype = ctypes.c_uint64
    names = ("HcclSend", "HcclRecv", "HcclBatchSendRecv")
    before = [library.mockCalls(name.encode()) for name in names]
    outputs = [compiled(x) for _ in range(2)]  # twice as it is, before anything is captured
    after = [library.mockCalls(name.encode()) for name in names]
    outputs += [compiled(x) for _ in range(4)]
    assert all(torch.equal(a, -9 * x) and torch.equal(b, 9 * x) for a, b in outputs)
    calls = [late - early for early, late in zip(before, after, strict=True)]
    print(f"rank {cg.rank()}: right, called {calls}", flush=True)


def drive(step: Any, x: torch.Tensor) -> None:
    """Execute the step as a graph, several executions at a time."""
    graph = step.lower(x).compile(max_inflight=3)
    if cg.rank() == 0:
        futures = [graph.execute(x * i) for i in range(6)]
        for i, future in enumerate(futures):
            a, b = future.result(timeout=30)
            assert torch.equal(a, -9 * i * x)
            assert torch.equal(b, 9 * i * x)
        graph.close()
    else:
        graph.serve()
    print(f"rank {cg.rank()}: driven", flush=True)


if __name__ == "__main__":
    main()
