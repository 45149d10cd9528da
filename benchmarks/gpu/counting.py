"""Count a host's calls of CUDA while something runs, and hold them against what it may."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

import cg

_CUDA = re.compile(r"cu(da)?[A-Z]")
"""How calls of the runtime and of the driver begin; kernels have other names."""


@dataclass(frozen=True)
class Counts:
    """How often the host has called what.

    Attributes:
        graphs: launches of graphs.
        launches: launches of kernels, and of functions of the host, outside of graphs.
        copies: copies and fills of memory outside of graphs.
        waits: calls that let the host wait for the device.
        calls: all calls of CUDA, by name.
    """

    graphs: int
    launches: int
    copies: int
    waits: int
    calls: Mapping[str, int]


def sort_out(counts: Mapping[str, int]) -> Counts:
    """Counts by kind, of how often a profile has each name."""
    calls = {name: count for name, count in counts.items() if _CUDA.match(name)}

    def total(pattern: str) -> int:
        return sum(count for name, count in calls.items() if re.search(pattern, name))

    graphs = total("GraphLaunch")
    return Counts(
        graphs, total("Launch") - graphs, total("Memcpy|Memset"), total("Synchronize"), calls
    )


def counted(run: Callable[[], object]) -> list[Counts]:
    """The calls that the hosts of all ranks make to their GPUs while each runs it, by rank."""
    torch.cuda.synchronize()
    cg.barrier()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        run()
        cg.barrier()
    torch.cuda.synchronize()
    mine = sort_out({event.key: event.count for event in trace.key_averages()})
    return cg.allgather(mine)


def check(
    found: Sequence[Counts], nothing: Sequence[Counts], steps: int, copies: Sequence[int]
) -> None:
    """Hold counts against what steps may do that are captured whole.

    Args:
        found: of each rank, in so many steps.
        nothing: of each rank, of a profile of nothing; a profiler waits for the device itself.
        steps: how many.
        copies: how many copies outside of graphs each rank may make in one step.

    Raises:
        AssertionError: a rank has launched other than one graph a step, or something outside of
            graphs, or has copied more, or has waited for its device.
    """
    for rank, (mine, idle) in enumerate(zip(found, nothing, strict=True)):
        where = f"rank {rank} in {steps} steps: {dict(mine.calls)}"
        assert mine.graphs == steps, f"{mine.graphs} launches of graphs on {where}"
        assert mine.launches == 0, f"{mine.launches} launches outside of graphs on {where}"
        assert mine.copies <= steps * copies[rank], f"{mine.copies} copies on {where}"
        assert mine.waits <= idle.waits, f"waits for the device, {mine.waits} of them, on {where}"
