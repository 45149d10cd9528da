"""Clips gradients on the ranks of a job, once awaiting the norm and once not: the same bits.

mpiexec -n 3 python -m tests.mpi.clipping_job
"""

from __future__ import annotations

import torch

import cg
from tests.properties.test_clipping import (
    LOUD,
    QUIET,
    ClippedStage,
    assert_same,
    batch,
    make,
    rounds,
)
from tests.tracer.groups.test_clipping_groups import PLAN, Actor, X


def main() -> None:
    torch.set_num_threads(1)
    sure, bold = (make("zb-h2", drops=True) for _ in range(2))
    order = cg.schedules.zb_h2()
    awaited = cg.trace(rounds(sure, 2.0, 2)).lower(*batch(0, 2)).compile(schedule=order)
    optimistic = (
        cg.trace(rounds(bold, 2.0, 2)).lower(*batch(0, 2)).compile_optimistic(schedule=order)
    )
    for seed, loud in enumerate([0, 1, 1, 0]):
        given = batch(seed, 2, 10 * LOUD if loud else QUIET)
        torch.testing.assert_close(optimistic(*given), awaited(*given), rtol=0, atol=0)
        pairs = [(a, b) for a, b in zip(bold, sure, strict=True) if a.is_local]
        assert_same([a for a, _ in pairs], [b for _, b in pairs], 0)
    raises(bold)
    outside()
    print(f"rank {cg.rank()}: undone {optimistic.undone}")


def outside() -> None:
    """A rank that has no piece of an actor takes part in the norm of its gradients."""
    stages = [Actor.on(cg.mesh([0, 1], dp=2, tp=1), plan=PLAN)(1), Actor.on(2)(2)]

    @cg.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        cg.backward(stages[1].forward(stages[0].forward(x)).square().mean())
        return cg.clip_grad_norm(stages, 0.1)

    plain = [Actor(1), Actor(2)]
    plain[1](plain[0](X)).square().mean().backward()
    parameters = [p for each in plain for p in each.parameters()]
    torch.testing.assert_close(step(X), torch.nn.utils.clip_grad_norm_(parameters, 0.1))


def raises(stages: list[ClippedStage]) -> None:
    """An exception of the first program is the caller's; one rank's is everybody's."""
    for stage in stages:
        if stage.is_local:
            stage.local.fragile = True
    program = cg.trace(rounds(stages, 1e9, 1)).lower(*batch(0)).compile_optimistic()
    try:
        program(*batch(0, 1, 10 * LOUD))
    except cg.RemoteError as error:
        assert "should have been clipped" in str(error)
        assert program.undone == 1
    else:
        raise AssertionError("nothing has been raised")


if __name__ == "__main__":
    main()
