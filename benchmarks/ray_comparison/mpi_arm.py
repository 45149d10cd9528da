"""The arm of raw mpi4py: the same bytes by Send and Recv, with nothing around them.

    python -m cg.launch -n 2 benchmarks/ray_comparison/mpi_arm.py --json FILE
    python -m cg.launch -n 4 benchmarks/ray_comparison/mpi_arm.py --json FILE

With 2 ranks it measures round trips, with 4 the other patterns.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI
from sampling import MIB, SLICE, Recorder, arguments

COMM = MPI.COMM_WORLD


def round_trip(buffer: np.ndarray) -> Callable[[], None]:
    """Rank 0 to rank 1 and back."""
    if COMM.rank == 0:

        def go() -> None:
            COMM.Send(buffer, 1)
            COMM.Recv(buffer, 1)
    else:

        def go() -> None:
            COMM.Recv(buffer, 0)
            COMM.Send(buffer, 0)

    return go


def chain(buffer: np.ndarray) -> Callable[[], None]:
    """Through all ranks in turn and back to rank 0."""
    before, after = (COMM.rank - 1) % COMM.size, (COMM.rank + 1) % COMM.size
    if COMM.rank == 0:

        def go() -> None:
            COMM.Send(buffer, after)
            COMM.Recv(buffer, before)
    else:

        def go() -> None:
            COMM.Recv(buffer, before)
            COMM.Send(buffer, after)

    return go


def scatter_gather(buffer: np.ndarray) -> Callable[[], None]:
    """Rank 0 to each other rank and back."""
    others = range(1, COMM.size)
    if COMM.rank != 0:

        def go() -> None:
            COMM.Recv(buffer, 0)
            COMM.Send(buffer, 0)

        return go
    answers = [np.empty_like(buffer) for _ in others]

    def lead() -> None:
        for rank in others:
            COMM.Send(buffer, rank)
        for rank, answer in zip(others, answers, strict=True):
            COMM.Recv(answer, rank)

    return lead


def measure(recorder: Recorder, cell: str, go: Callable[[], None]) -> None:
    """Slices of rounds, as many on all ranks; rank 0 times them and says when it is enough."""
    if not recorder.wants(cell):
        return
    samples = recorder.samples() if COMM.rank == 0 else None
    rounds = 50
    while rounds := told(rounds):
        times = []
        for _ in range(rounds):
            began = MPI.Wtime()
            go()
            times.append(int((MPI.Wtime() - began) * 1e9))
        if samples is not None:
            samples.add(times[len(times) // 6 :])
            each = max(float(np.median(times)), 1e3)
            rounds = max(int(SLICE / each), 5) if samples.wants_more() else 0
    if samples is not None:
        recorder.note(cell, samples.figures())


def told(count: int) -> int:
    """Return what rank 0 says. The others sleep while it looks whether the machine is quiet."""
    answer = np.array([count])
    request = COMM.Ibcast(answer)
    while not request.Test():
        time.sleep(1e-4)
    COMM.Barrier()
    return int(answer[0])


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    recorder = Recorder("mpi4py", args)
    byte = np.ones(1, dtype=np.uint8)
    if COMM.size == 2:
        measure(recorder, "round trip 1 B", round_trip(byte))
        for size in (MIB, 10 * MIB):
            cell = f"round trip {size // MIB} MiB numpy"
            measure(recorder, cell, round_trip(np.ones(size // 4, dtype=np.float32)))
    else:
        measure(recorder, "scatter-gather 1 B", scatter_gather(byte))
        measure(recorder, "chain 1 B", chain(byte))
    if COMM.rank == 0:
        recorder.save()


if __name__ == "__main__":
    main()
