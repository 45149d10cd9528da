"""For how long NCCL's kernels run, and for how long of that nothing else does, from a trace."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

Interval = tuple[float, float]


def profiled(run: Callable[[], object], steps: int) -> dict[str, float] | None:
    """Profile steps on this rank's GPU; `shares` of what was seen. None without a GPU."""
    if not torch.cuda.is_available() or not steps:
        return None
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return shares(json.loads(file.read_text())["traceEvents"], steps)


def shares(events: Iterable[dict[str, Any]], steps: int) -> dict[str, float]:
    """Milliseconds a step of kernels that communicate and of all others, each counted once.

    Exposed is the time in which a kernel of NCCL runs and no other kernel does. A receive in a
    pipeline waits for its sender in such a kernel, so bubbles are part of it.

    Args:
        events: of a Chrome trace, times in microseconds.
        steps: that the trace spans.
    """
    communication: list[Interval] = []
    computation: list[Interval] = []
    for event in events:
        if event.get("cat") == "kernel":
            is_nccl = "nccl" in event["name"].lower()
            interval = (event["ts"], event["ts"] + event["dur"])
            (communication if is_nccl else computation).append(interval)
    of_nccl, of_others = joined(communication), joined(computation)
    busy, working = length(of_nccl), length(of_others)
    exposed = length(joined([*of_nccl, *of_others])) - working
    return {
        "communication_ms": busy / steps / 1e3,
        "computation_ms": working / steps / 1e3,
        "exposed_ms": exposed / steps / 1e3,
        "exposed_share": exposed / busy if busy else 0.0,
    }


def joined(intervals: Sequence[Interval]) -> list[Interval]:
    """The same time as intervals that do not overlap, in order."""
    union: list[Interval] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((begin, end))
    return union


def length(intervals: Iterable[Interval]) -> float:
    """Of intervals that do not overlap."""
    return sum(end - begin for begin, end in intervals)
