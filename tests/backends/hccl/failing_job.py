"""A method raises before it sends by HCCL; what the other rank waits for never comes.

mpiexec -n 2 python -m tests.backends.hccl.failing_job
"""

from __future__ import annotations

import time

import torch

import cg


@cg.actor
class Part:
    """Passes on what it is given, unless that is negative."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def check(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.sum()) < 0:
            time.sleep(1.0)  # the other rank has nothing to do but to come to its receive
            raise ValueError("a negative sum")
        return x + 1


def main() -> None:
    parts = [Part.on(rank)() for rank in range(2)]

    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        return parts[1].forward(cg.via(parts[0].check(x), "hccl"))

    compiled = step.lower(torch.ones(2)).compile()
    print(f"rank {cg.rank()}: {compiled(torch.ones(2)).tolist()}", flush=True)
    try:
        compiled(-torch.ones(2))
    except cg.RemoteError as error:
        print(f"rank {cg.rank()}: {error.type_name}, {error.failure.message}", flush=True)
    compiled(torch.ones(2))
    print(f"rank {cg.rank()}: went on", flush=True)


if __name__ == "__main__":
    main()
