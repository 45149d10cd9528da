"""A 1-byte tensor from rank 0 to rank 1 and back, through a compiled graph and through raw mpi4py.

    python -m cg.launch -n 2 benchmarks/round_trip.py

All arms run in the same processes, in turns (ABCABC...). The compiled graph calls a method of an
actor on rank 1; `execute` starts it from rank 0 while rank 1 serves, and `step` is called on both
ranks and ends with a commit that they share.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
import torch

import cg


@cg.actor
class Echo:
    """Gives back what it gets."""

    def echo(self, x):
        return x


def echo_step():
    """The step: rank 0 to rank 1 to rank 0."""
    there = Echo.on(1)()

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def step(x):
        return there.echo(x)

    return step


def measure_execute(step, x, rounds: int) -> float:
    """Median time of `execute(x).result()`, in µs; on rank 1 of no meaning."""
    with step.lower(x).compile(max_inflight=1) as graph:
        if cg.rank() == 0:
            measure(lambda: graph.execute(x).result(), 200)
            return measure(lambda: graph.execute(x).result(), rounds)
    return 0.0


def raw_round_trip():
    """Send and Recv of one byte, there and back."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    buffer = np.zeros(1, dtype=np.uint8)
    if cg.rank() == 0:

        def go() -> None:
            comm.Send(buffer, 1)
            comm.Recv(buffer, 1)
    else:

        def go() -> None:
            comm.Recv(buffer, 0)
            comm.Send(buffer, 0)

    return go


def measure(go, rounds: int) -> float:
    """Median time of one round trip, in µs."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        go()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    if cg.world_size() != 2:
        raise SystemExit("this benchmark needs 2 ranks: python -m cg.launch -n 2 " + __file__)
    x = torch.zeros(1, dtype=torch.uint8)
    step = echo_step()
    compiled, raw = step.lower(x).compile(), raw_round_trip()
    arms = {
        "execute": lambda rounds: measure_execute(step, x, rounds),
        "step": lambda rounds: measure(lambda: compiled(x), rounds),
        "mpi4py": lambda rounds: measure(raw, rounds),
    }
    figures: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(args.repeats + 1):
        for name, run in arms.items():
            cg.barrier()
            figure = run(args.rounds if repeat else 200)
            if repeat:  # the first turn only warms up
                figures[name].append(figure)
    if cg.rank() == 0:
        medians = {name: statistics.median(values) for name, values in figures.items()}
        ratios = {name: medians[name] / medians["mpi4py"] for name in arms}
        print(f"{'arm':8} {'median µs':>10} {'range':>16} {'to mpi4py':>10}")
        for name, values in figures.items():
            spread = f"{min(values):.1f} to {max(values):.1f}"
            print(f"{name:8} {medians[name]:10.1f} {spread:>16} {ratios[name]:9.2f}x")
        if args.json:
            with open(args.json, "w") as file:
                json.dump({"round_trip_us": figures, "medians": medians, "ratios": ratios}, file)


if __name__ == "__main__":
    main()
