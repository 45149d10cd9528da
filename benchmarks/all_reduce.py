"""All-reduces of tensors on hosts, through a compiled step and through torch.distributed's gloo.

    python -m cg.launch -n 2 benchmarks/all_reduce.py

All arms run in the same processes, in turns (ABAB...). A round is a chain of all-reduces, each of
what the last one gave, scaled on every rank; its time is divided by their number. The arm "scale"
does the scaling alone.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import cg

CHAIN = 16
"""All-reduces in a round."""


@cg.actor
class Scale:
    """Keeps the numbers of a chain of sums in bounds."""

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5


def compiled_chain(x: torch.Tensor) -> Callable[[], object]:
    """A step of `CHAIN` all-reduces among all ranks."""
    actors = [Scale.on(rank)() for rank in range(cg.world_size())]

    @cg.trace
    def step(x):
        values = [x] * len(actors)
        for _ in range(CHAIN):
            scaled = [actor.scale(v) for actor, v in zip(actors, values, strict=True)]
            values = cg.all_reduce(scaled)
        return actors[0].scale(values[0]).sum()

    run = step.lower(x).compile()
    return lambda: run(x)


def gloo_chain(x: torch.Tensor) -> Callable[[], object]:
    """The same by torch.distributed."""

    def go() -> None:
        value = x
        for _ in range(CHAIN):
            value = value * 0.5
            dist.all_reduce(value)

    return go


def scale_chain(x: torch.Tensor) -> Callable[[], object]:
    """The work that both do besides."""

    def go() -> None:
        value = x
        for _ in range(CHAIN):
            value = value * 0.5

    return go


def join_gloo() -> None:
    """Make the process group; rank 0 chooses the port of its store."""
    rank, world = cg.rank(), cg.world_size()
    port = 0
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    port = cg.allgather(port)[0]
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def measure(go: Callable[[], object], rounds: int) -> float:
    """Median time of one all-reduce of a round, in µs."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        go()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6 / CHAIN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bytes", type=int, nargs="+", default=[4 << 10, 1 << 20])
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    if cg.world_size() < 2:
        raise SystemExit("this benchmark needs ranks: python -m cg.launch -n 2 " + __file__)
    torch.set_num_threads(1)
    join_gloo()
    found: dict[str, dict[str, list[float]]] = {}
    for nbytes in args.bytes:
        x = torch.ones(nbytes // 4)
        arms = {"cg": compiled_chain(x), "gloo": gloo_chain(x), "scale": scale_chain(x)}
        figures: dict[str, list[float]] = {name: [] for name in arms}
        for repeat in range(args.repeats + 1):
            for name, go in arms.items():
                cg.barrier()
                figure = measure(go, args.rounds if repeat else 10)
                if repeat:  # the first turn only warms up
                    figures[name].append(figure)
        found[str(nbytes)] = figures
        if cg.rank() == 0:
            medians = {name: statistics.median(values) for name, values in figures.items()}
            print(f"{nbytes} bytes, {cg.world_size()} ranks")
            for name, values in figures.items():
                spread = f"{min(values):.1f} to {max(values):.1f}"
                print(
                    f"  {name:6} {medians[name]:10.1f} µs {spread:>20} "
                    f"{medians[name] / medians['gloo']:8.2f}x gloo"
                )
    if cg.rank() == 0 and args.json:
        with open(args.json, "w") as file:
            json.dump({"all_reduce_us": found}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
