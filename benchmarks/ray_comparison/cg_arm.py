"""The arm of cg: rank 0 drives graphs over actors on ranks 1 to 3.

python -m cg.launch -n 4 benchmarks/ray_comparison/cg_arm.py --json FILE
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import torch
from sampling import (
    ACTORS,
    MIB,
    PATTERNS,
    WINDOWS,
    Recorder,
    arguments,
    check,
    idle,
    payload,
    sample,
    sample_async,
    throughput,
)

import cg


@cg.actor
class Echo:
    """Gives back what it gets."""

    def echo(self, x: Any) -> Any:
        return x

    @cg.opaque(fake=lambda self, x: torch.empty_like(x))
    def echo_tensor(self, x: torch.Tensor) -> torch.Tensor:
        return x


def compile_graph(pattern: str, actors: list[Any], example: Any, inflight: int = 1) -> Any:
    """One of the patterns over some actors, for values like `example`."""

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def step(x):
        if isinstance(example, torch.Tensor):
            return actors[0].echo_tensor(x)
        if pattern == "scatter-gather":
            return [actor.echo(x) for actor in actors]
        for actor in actors if pattern == "chain" else actors[:1]:
            x = actor.echo(x)
        return x

    return step.lower(example).compile(max_inflight=inflight)


def latency(recorder: Recorder, pattern: str, cell: str, graph: Any, value: Any) -> None:
    """Time executions one after the other."""
    if not recorder.wants(cell):
        return
    check(pattern, value, graph.execute(value).result())
    recorder.note(cell, sample(lambda: graph.execute(value).result(), recorder.samples()))


def latency_async(recorder: Recorder, pattern: str, cell: str, graph: Any) -> None:
    """The same, awaited in an event loop."""
    if not recorder.wants(cell):
        return

    async def go() -> None:
        check(pattern, b"x", await graph.execute(b"x"))

    recorder.note(cell, asyncio.run(sample_async(go, recorder.samples())))


def drive(
    recorder: Recorder,
    graphs: dict[str, Any],
    large: dict[tuple[str, int], Any],
    pids: list[int],
) -> None:
    """Measure everything."""
    for pattern in PATTERNS:
        latency(recorder, pattern, f"{pattern} 1 B", graphs[pattern], b"x")
    for pattern in PATTERNS:
        latency_async(recorder, pattern, f"{pattern} 1 B asyncio", graphs[pattern])
    for (kind, size), graph in large.items():
        cell = f"round trip {size // MIB} MiB {kind}"
        latency(recorder, "round trip", cell, graph, payload(kind, size))
    for pattern in ("round trip", "chain"):
        for window in WINDOWS:
            cell = f"{pattern} 1 B, {window} in flight"
            if recorder.wants(cell):
                graph = graphs[pattern]
                figures = throughput(
                    lambda graph=graph: graph.execute(b"x"),
                    lambda future: future.result(),
                    window,
                    recorder.seconds,
                )
                recorder.note(cell, figures)
    if recorder.wants("chain idle"):
        graph = graphs["chain"]
        recorder.note("chain idle", idle(lambda: graph.execute(b"x").result(), pids))


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    if cg.world_size() != ACTORS + 1:
        raise SystemExit(f"this needs {ACTORS + 1} ranks")
    recorder = Recorder("cg", args)
    actors = [Echo.on(rank)() for rank in range(1, ACTORS + 1)]
    graphs = {p: compile_graph(p, actors, cg.object, max(WINDOWS)) for p in PATTERNS}
    large = {}
    for size in (MIB, 10 * MIB):
        large["numpy", size] = graphs["round trip"]
        large["tensor", size] = compile_graph("round trip", actors, torch.empty(size // 4))
    everything = {id(graph): graph for graph in (*graphs.values(), *large.values())}.values()
    pids = cg.allgather(os.getpid())
    if cg.rank() == 0:
        drive(recorder, graphs, large, pids[1:])
        for graph in everything:
            graph.close()
        recorder.save()
    else:
        for graph in everything:
            graph.serve()


if __name__ == "__main__":
    main()
