"""What the host calls during steps that are captured whole."""

from __future__ import annotations

import torch

import cg

from .pipeline import MICROBATCHES, Linear
from .report import Report


def profile(report: Report) -> None:
    """What the host calls during steps that are captured whole."""
    a, b = Linear.on(0)(64), Linear.on(1)(64)
    x = torch.ones(MICROBATCHES * 64, 64, device="cuda")

    @cg.trace
    def step(x: torch.Tensor) -> None:
        losses = [b.loss(a.forward(part)) for part in cg.microbatches(x, MICROBATCHES)]
        cg.backward(cg.mean(losses))

    compiled = step.lower(x).compile()
    for _ in range(8):
        compiled(x)
    torch.cuda.synchronize()
    cg.barrier()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        for _ in range(10):
            compiled(x)
        cg.barrier()
    torch.cuda.synchronize()
    counts: dict[str, int] = {}
    for event in trace.key_averages():
        if event.key.startswith("cuda"):
            counts[event.key] = event.count
    launches = counts.get("cudaGraphLaunch", 0) / 10
    syncs = sum(n for key, n in counts.items() if "Synchronize" in key)
    report.note("profile", "graph launches in a step", launches, "", counts=counts)
    report.note(
        "profile", "synchronisations in 10 steps (the profiler's own end adds some)", syncs, ""
    )
    report.say("   ", counts)
    compiled.close()
