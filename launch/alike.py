"""Whether all ranks have traced a step with the same numbers: those that are in no plan."""

from __future__ import annotations

from ..backends.base import World
from ..backends.errors import PlanMismatch
from ..tracer.trace import Trace


def check_alike(world: World, trace: Trace) -> None:
    """Return if the torch functions that a step calls are given the same numbers on all ranks.

    They are part of what each rank runs by itself, and the text that plans are compared by says
    nothing of them. Steps that differ in more are for that comparison. Collective.

    Raises:
        PlanMismatch: they are given others; on every rank.
    """
    everywhere = world.allgather([(given.function, given.values) for given in trace.given])
    for rank, theirs in enumerate(everywhere):
        names = [function for function, _ in theirs]
        if names != [function for function, _ in everywhere[0]]:
            return
        for given, (_, first), (_, values) in zip(trace.given, everywhere[0], theirs, strict=True):
            if values != first:
                raise PlanMismatch(
                    f"the ranks have traced step {trace.module.name} with different numbers: "
                    f"{given.function}, called at {given.loc}, is given {', '.join(first)} on rank "
                    f"0, and {', '.join(values)} on rank {rank}. Every rank must trace the same "
                    "step with the same values: look for something that depends on the rank, on "
                    "time, or on unseeded random numbers"
                )
