"""What all arms of the comparison share: which cells there are, and how one is timed."""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ACTORS = 3
PATTERNS = ("round trip", "scatter-gather", "chain")
MIB = 1 << 20
WINDOWS = (1, 4, 16)

Figures = dict[str, Any]


def payload(kind: str, nbytes: int) -> Any:
    """A value of so many bytes, which begins with a byte that is not 0."""
    if kind == "bytes":
        return b"x" * nbytes
    array = np.zeros(nbytes // 4, dtype=np.float32)
    array[:] = 1.5
    return torch.from_numpy(array) if kind == "tensor" else array


def check(pattern: str, given: Any, results: Any) -> None:
    """That each result is what was given.

    Raises:
        ValueError: one is not.
    """
    for result in results if pattern == "scatter-gather" else [results]:
        if isinstance(given, bytes):
            same = result == given
        else:
            same = result.shape == given.shape and float(result[-1]) == float(given[-1])
        if not same:
            raise ValueError(f"{pattern} gave {result!r} for {given!r}")


def sample(go: Callable[[], object], seconds: float) -> Figures:
    """Times of `go`, one after the other, for so many seconds; a third of them before, untimed."""
    clock = time.perf_counter_ns
    until = clock() + int(seconds / 3 * 1e9)
    while clock() < until:
        go()
    times = []
    until = clock() + int(seconds * 1e9)
    while clock() < until or len(times) < 20:
        began = clock()
        go()
        times.append(clock() - began)
    return summary(times)


async def sample_async(go: Callable[[], Awaitable[object]], seconds: float) -> Figures:
    """The same in an event loop."""
    clock = time.perf_counter_ns
    until = clock() + int(seconds / 3 * 1e9)
    while clock() < until:
        await go()
    times = []
    until = clock() + int(seconds * 1e9)
    while clock() < until or len(times) < 20:
        began = clock()
        await go()
        times.append(clock() - began)
    return summary(times)


def throughput(
    start: Callable[[], Any], finish: Callable[[Any], object], window: int, seconds: float
) -> Figures:
    """Executions per second with `window` of them in flight, fetched in order."""
    clock = time.perf_counter
    waiting: deque[Any] = deque()
    count, began = 0, 0.0
    for phase in (seconds / 3, seconds):
        count, began = 0, clock()
        while clock() - began < phase:
            waiting.append(start())
            if len(waiting) == window:
                finish(waiting.popleft())
                count += 1
    took = clock() - began
    while waiting:
        finish(waiting.popleft())
    return {"per_second": count / took}


def idle(go: Callable[[], object], pids: list[int]) -> Figures:
    """What the busiest of some processes uses of a core while nothing is asked of it, and how long
    the first execution after that takes."""
    for _ in range(20):
        go()
    time.sleep(1.0)
    before = [cpu_seconds(pid) for pid in pids]
    time.sleep(2.0)
    share = max(cpu_seconds(pid) - b for pid, b in zip(pids, before, strict=True)) / 2
    began = time.perf_counter_ns()
    go()
    return {"idle_share": share, "wake_us": (time.perf_counter_ns() - began) / 1e3}


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def summary(times: list[int]) -> Figures:
    """Percentiles in µs of times in ns."""
    p50, p90 = np.percentile(times, [50, 90]) / 1e3
    return {"p50_us": float(p50), "p90_us": float(p90), "count": len(times)}


def arguments(description: str) -> argparse.ArgumentParser:
    """The options of every arm."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each cell")
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    return parser


class Recorder:
    """Collects the figures of one arm."""

    def __init__(self, arm: str, args: argparse.Namespace) -> None:
        self.arm = arm
        self.seconds: float = args.seconds
        self.cells: dict[str, Figures] = {}
        self._only: str = args.only
        self._file: Path = args.json

    def wants(self, cell: str) -> bool:
        """Whether a cell is to be measured."""
        return self._only in cell

    def note(self, cell: str, figures: Figures) -> None:
        """Keep the figures of a cell, and print them."""
        self.cells[cell] = figures
        shown = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
        print(f"{self.arm:20} {cell:32} {shown}", flush=True)

    def save(self) -> None:
        """Write all figures."""
        self._file.write_text(json.dumps(self.cells))
