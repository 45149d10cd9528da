"""Runs a scheduled module with a clock at every call, on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeAlias

from ..backends.base import Body, World
from ..backends.footprint import peak_bytes
from ..backends.instrument import instrument
from ..backends.program_times import ProgramTimes, RankTimes
from ..ir.communication import Span
from ..ir.module import Module
from ..ir.ops import Call
from .runtime import make_runtime

Stamps: TypeAlias = dict[int, tuple[float, float]]
"""When calls of a program started and ended, in seconds, by place in the program."""


@dataclass(frozen=True)
class Recording(ProgramTimes):
    """What the programs of a step came to when they ran; `spans` are those of calls.

    What a rank waited for is not known, so `exposed` is NaN. Each machine's clock begins when its
    first rank left a barrier just before.
    """


def record(
    world: World,
    module: Module,
    parameters: Sequence[str],
    bodies: Mapping[str, Body],
    constants: Mapping[str, Any],
    inputs: Callable[[], Sequence[Any]],
    executions: int,
    *,
    seed: int = 0,
    timeout: float | None = None,
) -> list[Recording]:
    """Run a module some times, and say when each call of each rank ran; collective.

    A call is timed on the host, around its function: what it has only started on a device does not
    count.

    Args:
        world: all ranks.
        module, parameters, bodies, constants, seed, timeout: as `make_runtime` takes them.
        inputs: gives the values of the step's parameters.
        executions: how often.

    Returns:
        A recording of each execution, the same on all ranks.

    Raises:
        RemoteError: a method raised, on any rank.
    """
    ranks = [rank for rank in range(module.world) if world.plays(rank)]
    stamps: dict[int, Stamps] = {rank: {} for rank in ranks}

    def clocked(rank: int, index: int, op: Call, body: Body) -> Body:
        return _clocked(body, index, stamps[rank])

    watched, watchers = instrument(module, bodies, ranks, clocked)
    runtime = make_runtime(
        world, watched, parameters, watchers, constants, seed=seed, timeout=timeout
    )
    found: list[tuple[float, dict[int, Stamps]]] = []
    try:
        for _ in range(executions):
            world.barrier()
            zero = perf_counter()
            runtime.run(inputs)
            found.append((zero, {rank: dict(stamps[rank]) for rank in ranks}))
    finally:
        runtime.close()
    everywhere = world.allgather(found)
    peaks = [peak_bytes(module, program) for program in module.programs]
    return [
        _recording(module, world.nodes, [of_rank[number] for of_rank in everywhere], peaks)
        for number in range(executions)
    ]


def _clocked(body: Body, index: int, stamps: Stamps) -> Body:
    def run(*inputs: Any) -> Sequence[Any]:
        start = perf_counter()
        outputs = body(*inputs)
        stamps[index] = (start, perf_counter())
        return outputs

    # How a failure finds the user's line.
    locate = getattr(body, "locate", None)
    if locate is not None:
        run.locate = locate  # type: ignore[attr-defined]
    return run


def _recording(
    module: Module,
    nodes: Sequence[int],
    everywhere: Sequence[tuple[float, dict[int, Stamps]]],
    peaks: Sequence[int],
) -> Recording:
    """One execution, from what each process has noted of it."""
    zeros: dict[int, float] = {}
    for node, (zero, _) in zip(nodes, everywhere, strict=True):
        zeros[node] = min(zero, zeros.get(node, math.inf))
    stamps = {rank: own for _, of_ranks in everywhere for rank, own in of_ranks.items()}
    ranks: list[RankTimes] = []
    spans: list[Span] = []
    for program, peak in zip(module.programs, peaks, strict=True):
        rank = program.rank or 0
        zero = zeros[nodes[rank]]
        own = [
            Span(rank, program.ops[index], (start - zero) * 1e3, (end - zero) * 1e3)
            for index, (start, end) in sorted(stamps[rank].items())
        ]
        first, last = (own[0].start, own[-1].end) if own else (0.0, 0.0)
        busy = sum(span.end - span.start for span in own)
        blocked = max(0.0, last - first - busy)
        ranks.append(RankTimes(rank, first, last, busy, blocked, math.nan, peak))
        spans += own
    return Recording(tuple(ranks), tuple(spans))
