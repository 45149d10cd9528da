"""The cells of the comparison, and how all arms time one."""

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
from quiet import Pace, Probe

ACTORS = 3
PATTERNS = ("round trip", "scatter-gather", "chain")
MIB = 1 << 20
WINDOWS = (1, 4, 16)

SLICE = 100_000_000
"""Nanoseconds of a slice."""

_UNTIMED = 20_000_000
"""Before each, for caches, for who has fallen asleep, and for processes to find their cores."""

_FEWEST = 20
_PATIENCE = 8

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


class Samples:
    """Times of one cell, taken in slices; those count in which the machine was quiet.

    Args:
        probe: measures the pace of the machine.
        best: the pace at its best.
        seconds: of quiet slices that are wanted. It gives up after `_PATIENCE` times as long.
    """

    def __init__(self, probe: Probe, best: Pace, seconds: float) -> None:
        self._best = best
        self._probe = probe
        self._seconds = seconds
        self._latest = time.monotonic() + _PATIENCE * seconds
        self._was_quiet = self._is_quiet()
        self._quiet: list[int] = []
        self._all: list[int] = []

    def wants_more(self) -> bool:
        """True if another slice is to be taken."""
        if len(self._all) < _FEWEST:
            return True
        enough = sum(self._quiet) >= self._seconds * 1e9 and len(self._quiet) >= _FEWEST
        return not enough and time.monotonic() < self._latest

    def add(self, times: list[int]) -> None:
        """Take in the times of a slice in ns, right behind it."""
        is_quiet = self._is_quiet()
        self._all += times
        if is_quiet and self._was_quiet:
            self._quiet += times
        self._was_quiet = is_quiet

    def figures(self) -> Figures:
        """Percentiles in µs of the quiet slices, or of all if there were too few quiet ones; the
        median of all of them; and how large a share of the time was quiet."""
        quiet = self._quiet if len(self._quiet) >= _FEWEST else self._all
        share = sum(self._quiet) / sum(self._all)
        return {**summary(quiet), "all_p50_us": summary(self._all)["p50_us"], "quiet": share}

    def _is_quiet(self) -> bool:
        return self._probe.pace().is_close_to(self._best)


def sample(go: Callable[[], object], samples: Samples) -> Figures:
    """Times of `go`, one after the other."""
    clock = time.perf_counter_ns
    while samples.wants_more():
        until = clock() + _UNTIMED
        while clock() < until:
            go()
        times = []
        until = clock() + SLICE
        while clock() < until:
            began = clock()
            go()
            times.append(clock() - began)
        samples.add(times)
    return samples.figures()


async def sample_async(go: Callable[[], Awaitable[object]], samples: Samples) -> Figures:
    """The same in an event loop."""
    clock = time.perf_counter_ns
    while samples.wants_more():
        until = clock() + _UNTIMED
        while clock() < until:
            await go()
        times = []
        until = clock() + SLICE
        while clock() < until:
            began = clock()
            await go()
            times.append(clock() - began)
        samples.add(times)
    return samples.figures()


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
    """The share of a core that the busiest of some processes uses while it is idle, and how long
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
    parser.add_argument("--best", type=float, nargs=3, required=True, help="a quiet.Pace")
    return parser


class Recorder:
    """Collects the figures of one arm."""

    def __init__(self, arm: str, args: argparse.Namespace) -> None:
        self.arm = arm
        self.seconds: float = args.seconds
        self.cells: dict[str, Figures] = {}
        self._only: str = args.only
        self._file: Path = args.json
        self._best = Pace(*args.best)
        self._probe = Probe()

    def wants(self, cell: str) -> bool:
        """True if a cell is to be measured."""
        return self._only in cell

    def samples(self) -> Samples:
        """The list that is to be filled with the times of a cell."""
        return Samples(self._probe, self._best, self.seconds)

    def note(self, cell: str, figures: Figures) -> None:
        """Keep the figures of a cell, and print them."""
        self.cells[cell] = figures
        shown = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
        print(f"{self.arm:20} {cell:32} {shown}", flush=True)

    def save(self) -> None:
        """Write all figures."""
        self._file.write_text(json.dumps(self.cells))
