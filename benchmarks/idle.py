"""Measure the cost of idle ranks, and the first execution after a pause.

    python -m cg.launch -n 4 benchmarks/idle.py

Rank 0 drives a chain over all others. The CPU time of every rank is read from the kernel while
nothing happens, so that nobody is woken to be measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import cg

WARM = 300


@cg.actor
class Echo:
    """Gives back what it gets."""

    def echo(self, x: Any) -> Any:
        return x


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process."""
    nanoseconds = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def idle_shares(pids: list[int], seconds: float) -> list[float]:
    """The share of a core that each rank uses, from a second after the last execution."""
    time.sleep(1.0)
    before = [cpu_seconds(pid) for pid in pids]
    time.sleep(seconds)
    return [(cpu_seconds(pid) - b) / seconds for pid, b in zip(pids, before, strict=True)]


def wake_ms(graph: Any, pauses: int, seconds: float) -> list[float]:
    """Times of the first execution after a pause, which leaves everybody asleep."""
    times = []
    for _ in range(pauses):
        time.sleep(seconds)
        began = time.perf_counter()
        graph.execute(b"x").result()
        times.append((time.perf_counter() - began) * 1e3)
    return times


async def waiting_share(graph: Any, seconds: float) -> float:
    """The share of a core that the driver's event loop uses while it awaits a long execution."""
    began = cpu_seconds(os.getpid())
    await graph.execute(seconds)
    return (cpu_seconds(os.getpid()) - began) / seconds


@cg.actor
class Sleeper:
    """Takes its time."""

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of rest")
    parser.add_argument("--pauses", type=int, default=15)
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    ranks = range(1, cg.world_size())
    echoes = [Echo.on(rank)() for rank in ranks]
    sleeper = Sleeper.on(cg.world_size() - 1)()

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def chain(x):
        for echo in echoes:
            x = echo.echo(x)
        return x

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def sleep(seconds):
        return sleeper.sleep(seconds)

    graph, slow = chain.lower(cg.object).compile(), sleep.lower(cg.object).compile()
    pids = cg.allgather(os.getpid())
    with graph, slow:
        if cg.rank() != 0:
            return
        for _ in range(WARM):
            graph.execute(b"x").result()
        shares = idle_shares(pids, args.seconds)
        slow.execute(0.01).result()
        figures = {
            "idle_share_of_a_core": shares,
            "awaiting_share_of_a_core": asyncio.run(waiting_share(slow, 3.0)),
            "first_after_pause_ms": wake_ms(graph, args.pauses, 1.2),
        }
    times = figures["first_after_pause_ms"]
    print("idle, share of a core, by rank: " + "  ".join(f"{share:.2%}" for share in shares))
    print(f"a loop that awaits, share of a core: {figures['awaiting_share_of_a_core']:.2%}")
    print(f"first after 1.2 s, ms: median {statistics.median(times):.2f}, most {max(times):.2f}")
    if args.json:
        Path(args.json).write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
