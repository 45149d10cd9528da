"""Time things on the host and on devices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

import cg


def per_call(run: Callable[[], object], warm: int = 10, count: int = 50) -> float:
    """Median µs of a call with the host waiting for the device after each; on all ranks."""
    for _ in range(warm):
        run()
    torch.cuda.synchronize()
    cg.barrier()
    return median(lambda: (run(), torch.cuda.current_stream().synchronize()), 0, count)


def median(run: Callable[[], object], warm: int, count: int) -> float:
    """Median µs of a call on this rank's host."""
    for _ in range(warm):
        run()
    times = []
    for _ in range(count):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def on_device(run: Callable[[], object], warm: int = 10, count: int = 30, inner: int = 10) -> float:
    """Median µs of a call on the device, with the host ahead: several calls between two events."""
    for _ in range(warm):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(count):
        cg.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)
        begin.record()
        for _ in range(inner):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / inner)
    return statistics.median(times) * 1e3


def alternately(
    runs: Mapping[str, Callable[[], object]],
    measure: Callable[[Callable[[], object]], float],
    rounds: int = 5,
) -> dict[str, float]:
    """Measure each of several calls in turn, some rounds of it; medians by name.

    One after the other they would meet different clocks and neighbours.
    """
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(measure(run))
    return {name: statistics.median(values) for name, values in found.items()}


def reasons(compiled: Any) -> list[str]:
    """Describe the segments of this rank's program: graphs, replays, and the reason of each."""
    (executables,) = [each for _, each in compiled._runtimes[0].bound.items()]
    segments = getattr(executables[0], "segments", ())
    return [f"{s.number}: {s.captures} graphs, {s.replays} replays, {s.reason}" for s in segments]
