"""Ctrl-C, and a rank that wants to exit, in a method of a step on devices.

    mpiexec -n 2 python -m tests.mpi.device_job tests.mpi.device_interrupt_job 0 1

The words are the ranks that are interrupted, one after the other; the step is called again after
each, compiled anew. In the end nobody catches it.
"""

from __future__ import annotations

import signal
import sys

import torch

import cg

CTRL_C, EXIT = 13.0, 14.0


@cg.actor
class Part(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def check(self, x: torch.Tensor) -> torch.Tensor:
        if x[0].item() == CTRL_C:
            signal.raise_signal(signal.SIGINT)
        if x[0].item() == EXIT:
            raise SystemExit(3)
        return x + 1


def main() -> None:
    parts = [Part.on(rank)() for rank in range(2)]
    for rank, kind in [(int(word), kind) for word in sys.argv[1:] for kind in (CTRL_C, EXIT, 0.0)]:

        @cg.trace(outputs=cg.on(1))
        def step(x: torch.Tensor, rank: int = rank) -> torch.Tensor:
            if rank == 0:
                return parts[1].forward(parts[0].check(x))
            return parts[1].check(parts[0].forward(x))

        compiled = step.lower(torch.ones(2)).compile()
        for _ in range(4):
            out = compiled(torch.ones(2))
            right = 4.0 if rank == 0 else 3.0
            assert out is None or out.tolist() == [right, right], out
        if kind:
            interrupt(compiled, rank, kind)
    compiled(torch.full((2,), CTRL_C / (1 + rank)))


def interrupt(compiled: cg.Compiled, rank: int, kind: float) -> None:
    """Every rank is to learn of it."""
    try:
        compiled(torch.full((2,), kind / (1 + rank)))
    except (KeyboardInterrupt, SystemExit) as error:
        print(f"rank {cg.rank()}: in {rank}: {type(error).__name__} {error}", flush=True)


if __name__ == "__main__":
    main()
