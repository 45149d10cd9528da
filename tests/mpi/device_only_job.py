"""Graphs driven from rank 0 that nothing can fail in on a host, so that no message is announced.

mpiexec -n 2 python -m tests.mpi.device_job tests.mpi.device_only_job
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

import cg
from cg.backends.devices.programs.instance import DeviceOnlyInstance

from .driven_job import WIDTH, driven, first, parts, play, x_of


def device_only() -> None:
    """A step that nothing can fail in on a host: one graph a rank, and the same values.

    HCCL does messages one after the other, so its hosts announce them.
    """
    is_ordered = "hccl" in sys.argv
    stages = parts()

    def step(x: torch.Tensor) -> Any:
        there = [stage.work(stage.forward(x)) for stage in stages[1:]]
        return stages[0].join(stages[0].work(x), there[0], there[-1]), there[0]

    def compare(passes: str) -> list[list[torch.Tensor]]:
        kept = []
        with driven(step, x_of(0), max_inflight=3, passes=passes) as graph:
            if cg.rank():
                graph.serve()
            else:
                futures = [graph.execute(x_of(i / 4)) for i in range(24)]
                random.Random(1).shuffle(futures)
                by_number = {each.execution: each.result(timeout=30) for each in futures}
                kept = [[each.cpu() for each in by_number[i]] for i in sorted(by_number)]
            contexts = graph._made.graph.contexts[cg.rank()]
            found = [each for context in contexts for each in context.instances]
            is_whole = not passes and not is_ordered
            assert {isinstance(each, DeviceOnlyInstance) for each in found} == {is_whole}, found
            segments = [s for each in found if is_whole for s in each.segments]
            assert all(each.reason is None for each in segments), [s.reason for s in segments]
            # Each context that was used has run twice as it is.
            replays = sum(each.replays for each in segments)
            assert 24 - 3 * 2 <= replays <= 24 - 2 if is_whole else replays == 0, replays
        return kept

    whole, announced = compare(""), compare("-capture")
    assert len(whole) == len(announced) == (0 if cg.rank() else 24)
    pairs = zip(whole, announced, strict=True)
    assert all(torch.equal(a, b) for pair in pairs for a, b in zip(*pair, strict=True))


def changed() -> None:
    """An actor is no longer what was traced: every execution says so, and harms nobody."""
    stages = parts()

    def step(x: torch.Tensor) -> torch.Tensor:
        return stages[0].forward(stages[1].forward(x))

    def read(x: torch.Tensor) -> torch.Tensor:
        return stages[0].forward(stages[1].plus(x))

    graph, other = (driven(step, x_of(0), max_inflight=2) for _ in range(2))
    reader = driven(read, x_of(0), max_inflight=2)
    with graph:
        if cg.rank() == 0:
            assert first(graph.execute(x_of(1)).result()) == 6.0
    if cg.rank() == 1:
        stages[1].local.rank = 7
        stages[1].local.total = torch.zeros(2 * WIDTH)  # with which the method itself would raise
    cg.barrier()  # a rank that still serves the first graph would serve the other, too
    with other, reader:
        if cg.rank() == 0:
            for graph in (other, reader) * 4:
                error = graph.execute(x_of(1)).exception(timeout=30)
                assert isinstance(error, RuntimeError), error
                assert "compile the step again" in str(error), error
    with driven(step, x_of(0), max_inflight=2) as again:
        if cg.rank() == 0:
            assert first(again.execute(x_of(1)).result()) == 18.0


def beside() -> None:
    """Executions of a graph whose messages are announced, and whose methods wait for the device."""
    stages = parts()

    def talks(x: torch.Tensor) -> torch.Tensor:
        name = stages[1].label(stages[1].forward(x))
        there = stages[0].named(stages[0].forward(x), name)
        back = stages[1].named(x, stages[0].label(there))
        return stages[0].forward(stages[1].forward(back))

    def step(x: torch.Tensor) -> torch.Tensor:
        return stages[0].forward(stages[1].forward(x))

    announced, whole = (driven(each, x_of(0), max_inflight=3) for each in (talks, step))
    with announced, whole:
        if cg.rank() == 0:
            futures = [(announced if i % 3 else whole).execute(x_of(i % 5)) for i in range(30)]
            for i, future in enumerate(futures):
                x = i % 5
                back = x + (2 * x + 2 * x + 1)
                right = 2 * (2 * back + 1) if i % 3 else 2 * (2 * x + 1)
                assert first(future.result(timeout=30)) == right, i


def main() -> None:
    play((device_only, changed, beside))


if __name__ == "__main__":
    main()
