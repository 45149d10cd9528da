"""Compile a step with the schedule that is fastest on paper, of those that a search has found."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

from ...ir.clone import clone
from ...ir.diagnostics import IRError
from ...ir.module import Module
from ...passes.base import Pipeline
from ...passes.frontend.fsdp import Fsdp
from ...passes.manager import DumpSink, PassManager, PassReport
from ...passes.schedules import Schedule, candidates, gpipe, is_search, looped_bfs
from ...passes.simulate.program_simulator import simulate_programs
from ...passes.simulate.residency import Residency, ResidencyError
from ...tracer.errors import TraceError

PipelineOf = Callable[[Schedule | None], Pipeline]
"""The passes that compile a step with a schedule."""


def run_passes(
    schedule: Schedule | None, module: Module, pipeline_of: PipelineOf, sink: DumpSink | None
) -> tuple[Module, list[PassReport]]:
    """Compile a module with a schedule; with all forwards first where a search finds no order.

    A search mixes forwards and backwards. Where a backward has to follow all forwards, as that of
    a loss over all microbatches, there is nothing to search for, and a warning says so. Not where
    the search is given a bound on activations, which such an order does not keep to.

    Args:
        schedule: as `default_pipeline` takes it.
        module: traced; it stays as it is.
        pipeline_of: the passes for a schedule.
        sink: hears of every pass.

    Raises:
        IRError, ValueError: as the passes do.
    """
    try:
        return _run(select_schedule(schedule, module, pipeline_of), module, pipeline_of, sink)
    except IRError as error:
        if schedule is None or not is_search(schedule):
            raise
        if dict(schedule.options)["max_activations"] is not None:
            raise
        for instead in (gpipe(), looped_bfs()):
            try:
                found = _run(instead, module, pipeline_of, sink)
            except (IRError, ValueError):
                continue
            warnings.warn(
                f"step {module.name} is compiled with the schedule '{instead.name}' instead of "
                f"'{schedule.name}', which finds no order that mixes forwards and backwards: "
                f"{_why(error)}",
                stacklevel=4,
            )
            return found
        raise


def choose_residency(
    residency: Residency | None,
    schedule: Schedule | None,
    module: Module,
    pipeline_of: Callable[..., Pipeline],
) -> Fsdp | None:
    """The pass that gathers stored parameters, as far as memory allows what the user has chosen.

    The choice is the same on all ranks: it depends on nothing but the step and the options.

    Args:
        residency: what `compile` was given, if it was.
        schedule, module, pipeline_of: as for `run_passes`; with `fsdp=` for the pass.

    Raises:
        IRError, ValueError: as the passes do.
        TraceError: the step has no such parameters, or they do not fit.
    """
    if residency is None:
        return None

    def compiled(fsdp: Fsdp) -> Module:
        return run_passes(schedule, module, partial(pipeline_of, fsdp=fsdp), None)[0]

    try:
        return residency.choose(module, compiled)
    except ResidencyError as error:
        raise TraceError(error.reason, loc=residency.loc, remedy=error.remedy) from None


def _run(
    schedule: Schedule | None, module: Module, pipeline_of: PipelineOf, sink: DumpSink | None
) -> tuple[Module, list[PassReport]]:
    copy = clone(module)
    return copy, PassManager(pipeline_of(schedule), dump=sink).run(copy)


def _why(error: IRError) -> str:
    """The part of the circle that is no matter of the order that was tried, in one line."""
    notes = [note for each in error.diagnostics for note in each.notes]
    found = [note for note in notes if "by the order of" not in note.message]
    found.sort(key=lambda note: note.op is None or note.op.mb is not None)  # outside of the loop
    if not found:
        return "its tasks wait for each other"
    op = found[0].op
    return found[0].message if op is None else f"{found[0].message} ({op.loc})"


def select_schedule(
    schedule: Schedule | None, module: Module, pipeline_of: PipelineOf
) -> Schedule | None:
    """The schedule, or, if that is a search with costs, the candidate that is fastest on paper.

    The search plays orders of tasks; here are whole programs, with the messages, streams and slots
    that they come to have. The choice is the same on all ranks, as it depends on nothing else.

    Args:
        schedule: as `default_pipeline` takes it.
        module: traced; it stays as it is.
        pipeline_of: the passes that compile it with a schedule.

    Raises:
        IRError, ValueError: as compiling does.
    """
    if not isinstance(schedule, Schedule):
        return schedule
    found = candidates(schedule)
    if len(found) == 1:
        return schedule
    costs = dict(schedule.options)["costs"]

    def makespan(candidate: Schedule) -> float:
        compiled = clone(module)
        PassManager(pipeline_of(candidate)).run(compiled)
        # Times are sums of the same numbers in other orders: equal ones may differ a little.
        return round(simulate_programs(compiled, costs).makespan, 9)

    return min(found, key=makespan)
