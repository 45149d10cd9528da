"""A device that captures nothing: values are right, and every rank says why it replays nothing.

    CG_DUMP=dumps mpiexec -n 2 python -m tests.mpi.device_job tests.mpi.fallback_job

Rank 0 has a device that captures.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

import cg
from cg.launch.world.world import world

from .driven_job import Part, driven, first, x_of

REASON = "it cannot be captured: this device records nothing"


def refuse(work: Callable[[], None], _queue: object) -> Any:
    raise RuntimeError("this device records nothing")


def together() -> None:
    """A step on all ranks."""
    parts = [Part.on(rank)(rank) for rank in range(2)]

    @cg.trace
    def whole(x: torch.Tensor) -> torch.Tensor:
        return parts[0].plus(parts[1].forward(parts[0].forward(x)))

    compiled = whole.lower(x_of(0)).compile()
    for i in range(5):
        assert first(compiled(x_of(i))) == 4 * i + 1, i
        is_known = i >= 2 and cg.rank() == 1
        assert compiled.uncaptured() == ({0: REASON} if is_known else {}), compiled.uncaptured()
    compiled.close()


def from_one() -> None:
    """A graph that rank 0 drives; one part of it is not worth a graph.

    Its messages are announced, since one of its methods is opaque.
    """
    parts = [Part.on(rank)(rank) for rank in range(2)]

    def step(x: torch.Tensor) -> torch.Tensor:
        return parts[0].check(parts[0].add(parts[1].work(parts[0].plus(x))))

    with driven(step, x_of(0), max_inflight=3) as graph:
        if cg.rank():
            graph.serve()
        else:
            for future in [graph.execute(x_of(1)) for _ in range(12)]:
                future.result(timeout=30)
            graph.close()
        reasons = set(graph.uncaptured().values())
    few = "1 of the 8 operators of torch that are worth it"
    assert few in reasons if cg.rank() == 0 else reasons == {REASON}, reasons


def main() -> None:
    if cg.rank() == 1:
        device: Any = world().device
        device.capture = refuse
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        together()
        from_one()
    said = [str(each.message) for each in caught if each.category is RuntimeWarning]
    assert len(said) == (2 if cg.rank() == 1 else 0), said
    heads = [text.partition(" (")[0] for text in said]
    assert heads == [f"rank 1 puts graph 0 of '{n}'" for n in ("whole", "step")][: len(said)], said
    print(f"rank {cg.rank()}: what falls back says so")


if __name__ == "__main__":
    main()
