"""Errors that name ranks that have diverged, or have ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...agreement.gather import SAME_CALLS
from ...errors import PeerLost, PlanMismatch, TransportError
from .rank_status import BarrierWord, StatusTable, named


def out_of_step(why: PlanMismatch) -> TransportError:
    """The error of every call that follows after ranks have diverged."""
    return TransportError(
        f"the ranks are out of step since an earlier error: {why}. Start the job again"
    )


def other_plan(table: StatusTable, epoch: int, plans: Mapping[int, int]) -> PlanMismatch:
    """The error of two ranks that execute different plans, which `plans` has by rank."""
    first, second = (
        f"plan {plan:016x} on rank {rank}{_in_parentheses(table.doing(rank))}"
        for rank, plan in sorted(plans.items())
    )
    return PlanMismatch(
        f"{named(epoch)} is of {first}, and of {second}. Every rank must "
        "call the same compiled steps, with inputs of the same types, in the same order; look "
        "for a call that depends on the rank"
    )


def other_call(table: StatusTable, ranks: Sequence[int]) -> PlanMismatch:
    """The error of ranks that have come to different executions or calls of the world."""
    where = "; ".join(f"rank {rank} is in {table.doing(rank)}" for rank in sorted(ranks))
    return PlanMismatch(
        f"the ranks have come to different calls: {where}. {SAME_CALLS}, and "
        "call a step with arguments of the same types: look for "
        "a last batch that is smaller on one rank (drop_last=True), a clear_cache() that not "
        "all ranks do, or a call that depends on the rank"
    )


def lost(table: StatusTable, rank: int, epoch: int) -> PeerLost:
    """The error of ranks in an execution to which `rank`, which has ended, will not come."""
    how, why = "has died", "Start the job again"
    has_died = table.has_died(rank)
    if not has_died:
        how = "has ended"
        why = (
            "All ranks must make the same calls: this one has perhaps skipped a call, or had fewer "
            "batches. Start the job again"
        )
    last = table.reached(rank, BarrierWord.COMMIT)
    after = f"after {named(last)}" if last else "before the end of the first execution"
    return PeerLost(
        f"rank {rank} {how} {after}, and the other ranks are in {named(epoch)}. {why}",
        rank,
        has_died,
    )


def _in_parentheses(doing: str) -> str:
    return f" ({doing})" if doing else ""
