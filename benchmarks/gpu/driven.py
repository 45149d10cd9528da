"""A graph that rank 0 drives: a tensor goes to rank 1 and back."""

from __future__ import annotations

import cProfile
import pstats
import sys
from typing import Any

import torch

import cg

from .by_hand import HandRoundTrip
from .report import Report
from .round_trip import SIZES, Echo
from .timing import median, per_call

IN_FLIGHT = 8


def driven(report: Report) -> None:
    """`execute(x).result()`, alone and with the device waited for; and with several in flight."""
    there = Echo.on(1)()

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def step(x: torch.Tensor) -> torch.Tensor:
        return there.forward(x)

    for label, numel in SIZES:
        x = torch.arange(numel, dtype=torch.float32, device="cuda")
        by_hand = HandRoundTrip(numel)
        hand = per_call(by_hand.replay)
        by_hand.close()
        graph = step.lower(x).compile(max_inflight=IN_FLIGHT)
        found = {"result": 0.0, "result and wait": 0.0, f"{IN_FLIGHT} in flight, each": 0.0}
        with graph:
            if cg.rank() == 0:
                vias = {channel.via for channel in graph.module.channels.values()}
                assert vias == {"nccl"}, f"tensors take another way: {vias}"
                assert torch.equal(graph.execute(x).result(), x), "it gives another value"
                found = measure(graph, x)
                if numel == SIZES[0][1]:
                    where_the_time_goes(graph, x)
        for what, value in found.items():
            ratio = value / hand
            report.note("driven", f"{label} execute, {what}", value, "µs", ratio=ratio)
        report.note("driven", f"{label} by hand, launch and wait", hand, "µs")


def measure(graph: Any, x: torch.Tensor) -> dict[str, float]:
    """Medians in µs, on the driver."""

    def waited() -> None:
        graph.execute(x).result()
        torch.cuda.current_stream().synchronize()

    def in_flight() -> None:
        futures = [graph.execute(x) for _ in range(IN_FLIGHT)]
        for future in futures:
            future.result()
        torch.cuda.current_stream().synchronize()

    return {
        "result": median(lambda: graph.execute(x).result(), 50, 300),
        "result and wait": median(waited, 50, 300),
        f"{IN_FLIGHT} in flight, each": median(in_flight, 30, 100) / IN_FLIGHT,
    }


def where_the_time_goes(graph: Any, x: torch.Tensor) -> None:
    """A profile of the driver's host."""
    watch = cProfile.Profile()
    watch.enable()
    for _ in range(500):
        graph.execute(x).result()
    watch.disable()
    torch.cuda.synchronize()
    pstats.Stats(watch, stream=sys.stdout).sort_stats("tottime").print_stats(22)
