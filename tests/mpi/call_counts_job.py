"""Counts the Python calls of steady executions of a step with one message to a rank and back.

    mpiexec -n 2 python -m tests.mpi.call_counts_job

Each rank prints the least count of many calls of the step, and rank 0 that of many starts of an
execution. What lasts as long as other ranks take is left out, so the counts are those of a rank
that never waits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

import cg

WAITING = {"Engine._wait", "Control._wait_at", "Doorbell.ring"}
"""Functions whose calls, and the calls inside of which, depend on when other ranks come."""

TIMES = 50


@cg.actor
class Echo:
    """Gives back what it gets."""

    def echo(self, x: Any) -> Any:
        return x


class CallCounter:
    """Counts calls of Python functions, but for those that wait; for `sys.setprofile`."""

    def __init__(self) -> None:
        self.calls = 0
        self._waits = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        waits = frame.f_code.co_qualname in WAITING
        if event == "call":
            self._waits += waits
            self.calls += not self._waits
        elif event == "return":
            self._waits -= waits


def least_calls(run: Callable[[], Any], after: Callable[[Any], Any]) -> int:
    """The least count of many runs; `after` gets what each has returned, and is not counted."""
    counts = []
    for _ in range(TIMES):
        counter = CallCounter()
        sys.setprofile(counter)
        try:
            result = run()
        finally:
            sys.setprofile(None)
        after(result)
        counts.append(counter.calls)
    return min(counts)


def main() -> None:
    there = Echo.on(1)()
    x = torch.zeros(1)

    @cg.trace(inputs=cg.on(0), outputs=cg.on(0))
    def step(x: Any) -> Any:
        return there.echo(x)

    compiled = step.lower(x).compile()
    count = least_calls(lambda: compiled(x), lambda _: None)
    print(f"rank {cg.rank()}: {count} calls in a step", flush=True)
    with step.lower(x).compile(max_inflight=1) as graph:
        if cg.rank() == 0:
            count = least_calls(lambda: graph.execute(x), lambda future: future.result())
            print(f"rank 0: {count} calls to start an execution", flush=True)


if __name__ == "__main__":
    main()
