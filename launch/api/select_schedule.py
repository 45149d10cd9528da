"""Compile a step with the schedule that is fastest on paper, of those that a search has found."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ...backends.agreement.gather import gather
from ...backends.base import World
from ...ir.attributes import Action
from ...ir.ops.module import Module
from ...ir.pipeline.costs import Costs, Link
from ...ir.text.diagnostics import IRError
from ...ir.text.files import read_text
from ...passes.base import Pipeline
from ...passes.frontend.fsdp import Fsdp
from ...passes.manager.manager import DumpSink, run_on_copy
from ...passes.manager.pipelines import default_pipeline
from ...passes.schedules import (
    Order,
    Schedule,
    candidates,
    found_orders,
    gpipe,
    is_search,
    looped_bfs,
)
from ...passes.schedules import Pipeline as Stages
from ...passes.simulate.program_simulator import simulate_programs
from ...passes.simulate.residency import Residency, ResidencyError
from ...passes.simulate.stage_memory import StageMemory, stage_memory
from ...tracer.errors import TraceError
from ...tracer.source import caller_level
from ..cache.compile_cache import CompileCache
from ..cache.program_entries import Scheduled, from_cache

PipelineOf = Callable[[Schedule | None], Pipeline]
"""The passes that compile a step with a schedule."""


def wants_costs(schedule: Schedule | None) -> bool:
    """True if a schedule is a search whose costs are to be measured."""
    return bool(search_options(schedule).get("measure"))


def with_costs(schedule: Schedule, measure: Callable[[Schedule], Costs], world: World) -> Schedule:
    """A search with costs that are read from its file, or measured; collective.

    Args:
        schedule: a search that wants costs.
        measure: measures them, on all ranks, with a step that is compiled with the given schedule.
        world: all ranks; rank 0 reads and writes the file.

    Raises:
        ValueError: the file does not hold costs.
    """
    file = dict(schedule.options)["measure"]
    schedule = with_options(schedule, measure=False)
    stored: str | None = None
    if isinstance(file, str) and world.rank == 0 and Path(file).exists():
        stored = read_text(file)
    text = gather(world, "cg.schedules.auto(measure=...)", stored)[0]
    if text is not None:
        costs = Costs.from_json(text, str(file))
    else:
        # Where stages are to recompute, the step is measured in the memory of 1F1B.
        plain = {"remat": False, "max_activations": None, "max_bytes": None}
        costs = measure(with_options(schedule, **plain) if wants_remat(schedule) else schedule)
        if isinstance(file, str) and world.rank == 0:
            costs.save(file)
    return with_options(schedule, costs=costs)


def costs_of(schedule: Schedule | None) -> Costs | None:
    """The costs that a search goes by, if it has any."""
    costs: Costs | None = search_options(schedule).get("costs")
    return costs


def check_costs(schedule: Schedule | None) -> None:
    """Return if the costs do not say which stages recompute, since a step's trace says that.

    Raises:
        ValueError: some do.
    """
    costs = costs_of(schedule)
    if costs is not None and costs.remat:
        raise ValueError(
            f"the costs say that stages {costs.remat} recompute, which is for orders on paper; "
            "auto(remat=True) lets stages of a step recompute, or cg.remat(actor.method) in it"
        )


def refuse_two_limits(schedule: Schedule | None) -> None:
    """Return if a search does not choose by memory itself, beside `compile(memory=...)`.

    Raises:
        ValueError: it has `max_bytes` or `remat`.
    """
    options = search_options(schedule)
    for name in ("max_bytes", "remat"):
        if options.get(name):
            raise ValueError(
                f"compile(memory=...) and auto({name}=...) both say what a program may hold; leave "
                f"{name} away, and memory= chooses what backwards compute again"
            )


def with_host_link(schedule: Schedule | None, link: Link | None) -> Schedule | None:
    """A search with costs that compares programs by the link between a device and its host."""
    costs = costs_of(schedule)
    if schedule is None or costs is None or link is None:
        return schedule
    return with_options(schedule, costs=replace(costs, host=link))


def narrower(schedule: Schedule | None, ranks: int) -> list[Schedule | None]:
    """The schedule, and for a search also such that hold less and less.

    Without a bound on activations there are some with bounds. Then the same come without W, as
    nothing computes again what B leaves to it.

    Args:
        schedule: as `default_pipeline` takes it.
        ranks: the number of ranks.
    """
    options = search_options(schedule)
    if schedule is None or not options:
        return [schedule]
    searches = [schedule]
    if options["max_activations"] is None:
        fewer = (share for share in (ranks / 2, ranks / 4, 1.0) if share >= 1)
        searches += [with_options(schedule, max_activations=m) for m in dict.fromkeys(fewer)]
    without = [replace(with_options(each, splits=False), splits=False) for each in searches]
    return [*searches, *(without if schedule.splits else ())]


def wants_memory(schedule: Schedule | None) -> bool:
    """True if a search is given memory in bytes, and no costs with the bytes of stages."""
    costs = costs_of(schedule)
    is_in_bytes = search_options(schedule).get("max_bytes") is not None
    return is_in_bytes and (costs is None or costs.activation_bytes is None)


def with_memory(schedule: Schedule, modules: Sequence[Module]) -> Schedule:
    """A search whose costs have the bytes that stages hold in a step.

    Args:
        schedule: a search that wants memory.
        modules: traced, for each signature; the largest of what they hold counts.

    Raises:
        ValueError: they have different stages.
    """
    memories = [stages_of(module)[0] for module in modules]
    if len({memory.actors for memory in memories}) > 1:
        raise ValueError(
            "auto(max_bytes=...): the signatures of the step have different stages; give "
            "Costs(activation_bytes=...), what a microbatch holds on each"
        )
    costs = dict(schedule.options)["costs"] or Costs()
    return with_options(schedule, costs=_with_bytes(costs, memories))


def wants_remat(schedule: Schedule | None) -> bool:
    """True if a search may choose stages that recompute."""
    return bool(search_options(schedule).get("remat"))


def choose_remat(
    schedule: Schedule, module: Module, again: Module
) -> tuple[Schedule, frozenset[str]]:
    """The actors that a search lets recompute, and the search for the step in which they do.

    Args:
        schedule: a search that wants remat.
        module: traced.
        again: traced with all actors recomputing that can.

    Raises:
        IRError, ValueError: as compiling, or the search, does.
    """
    costs = dict(schedule.options)["costs"] or Costs()
    memory, pipeline = stages_of(module)
    if costs.mr is None:
        pairs = zip(memory.activations, stages_of(again)[0].activations, strict=True)
        shares = (min(1.0, less / plain) if plain else 1.0 for plain, less in pairs)
        costs = replace(costs, mr=tuple(shares))
    best_order = found_orders(with_options(schedule, costs=costs), pipeline)[0]
    actors = frozenset(memory.actors[stage] for stage in best_order.remat)
    stages = tuple(s for s, actor in enumerate(memory.actors) if actor in actors)
    # Times of single functions are those of backwards that do not recompute.
    functions = {
        name: time
        for name, time in costs.functions.items()
        if name not in module.functions or module.functions[name].actor not in actors
    }
    costs = replace(costs, remat=stages, functions=functions)
    return with_options(schedule, costs=costs, remat=False), actors


def _with_bytes(costs: Costs, memories: Sequence[StageMemory]) -> Costs:
    """The costs, with the most bytes that the stages of any module hold."""
    activations = [memory.activations for memory in memories]
    weights = [memory.weights for memory in memories]
    return replace(
        costs,
        activation_bytes=tuple(map(max, zip(*activations, strict=True))),
        weight_bytes=tuple(map(max, zip(*weights, strict=True))),
    )


def search_options(schedule: Schedule | None) -> dict[str, Any]:
    """The options of a search; none of other schedules."""
    if not isinstance(schedule, Schedule) or not is_search(schedule):
        return {}
    return dict(schedule.options)


def with_options(schedule: Schedule, **options: Any) -> Schedule:
    """The schedule with other options."""
    return replace(schedule, options=tuple((dict(schedule.options) | options).items()))


def stages_of(module: Module) -> tuple[StageMemory, Stages]:
    """The memory of the stages of a traced step, and its pipeline."""
    pipelines: list[Stages] = []

    def order(pipeline: Stages) -> Order:
        """Any order serves, as long as B and W are tasks of their own."""
        pipelines.append(pipeline)
        return {
            rank: [*tasks, *(t.beside(Action.WEIGHT) for t in tasks if t.action is Action.BACKWARD)]
            for rank, tasks in gpipe()(pipeline).items()
        }

    watched = default_pipeline(Schedule("gpipe with W", order, splits=True))
    copy, _ = run_on_copy(watched, module)
    if len(set(pipelines)) != 1:
        raise ValueError(
            f"step {module.name} has {len(set(pipelines))} pipelines, and auto measures what "
            "stages hold of a step that has one; give Costs(activation_bytes=...), and use "
            "cg.remat(actor.method) in the step"
        )
    return stage_memory(copy), pipelines[0]


def compile_module(
    residency: Residency | None,
    schedule: Schedule | None,
    module: Module,
    text: str,
    pipeline_of: Callable[..., Pipeline],
    sink: DumpSink | None,
    cache: CompileCache,
    rank: int | None,
) -> Scheduled:
    """The programs of a traced module, of an earlier start or made now.

    Args:
        residency: the `fsdp` of `compile`.
        schedule, module: as for `run_passes`.
        text: of the module, with locations.
        pipeline_of: the passes for a schedule; with `fsdp=` for the pass that gathers.
        sink: hears of every pass, so that all have to run; None: nobody listens.
        cache: where earlier starts have kept programs.
        rank: as in `from_cache`.

    Raises:
        IRError, ValueError, TraceError: as the passes, and `choose_residency`, do.
    """

    def make() -> Scheduled:
        fsdp = choose_residency(residency, schedule, module, pipeline_of)
        return run_passes(schedule, module, partial(pipeline_of, fsdp=fsdp), sink)

    if sink is not None:
        return make()
    options = (residency, schedule, pipeline_of)
    return from_cache(cache, module, text, options, make, rank=rank)


def run_passes(
    schedule: Schedule | None, module: Module, pipeline_of: PipelineOf, sink: DumpSink | None
) -> Scheduled:
    """Compile a module with a schedule; with all forwards first where a search finds no order.

    A search mixes forwards and backwards. Where a backward has to follow all forwards, as that of
    a loss over all microbatches, there is nothing to search for, and a warning says so. If the
    search is given a bound on activations, the error is raised: such an order exceeds the bound.

    Args:
        schedule: as `default_pipeline` takes it.
        module: traced; it stays as it is.
        pipeline_of: the passes for a schedule.
        sink: hears of every pass.

    Raises:
        IRError, ValueError: as the passes do.
    """
    try:
        return _run(_select_schedule(schedule, module, pipeline_of), module, pipeline_of, sink)
    except IRError as error:
        options = search_options(schedule)
        bounds = (options.get(name) for name in ("max_activations", "max_bytes"))
        if schedule is None or not options or any(bound is not None for bound in bounds):
            raise
        for fallback in (gpipe(), looped_bfs()):
            try:
                scheduled = _run(fallback, module, pipeline_of, sink)
            except (IRError, ValueError):
                continue
            warnings.warn(
                f"step {module.name} is compiled with the schedule '{fallback.name}' instead of "
                f"'{schedule.name}', which finds no order that mixes forwards and backwards: "
                f"{_why(error)}",
                stacklevel=caller_level(),
            )
            choice = f"{fallback.name}: no order mixes forwards and backwards"
            return replace(scheduled, choice=choice, is_other=True)
        raise


def choose_residency(
    residency: Residency | None,
    schedule: Schedule | None,
    module: Module,
    pipeline_of: Callable[..., Pipeline],
) -> Fsdp | None:
    """The pass that gathers stored parameters, as the user's choice and memory allow.

    The choice is the same on all ranks: it depends on nothing but the step and the options.

    Args:
        residency: the `fsdp` of `compile`.
        schedule, module, pipeline_of: as for `run_passes`; with `fsdp=` for the pass.

    Raises:
        IRError, ValueError: as the passes do.
        TraceError: the step has no such parameters, or they do not fit.
    """
    if residency is None:
        return None

    def compiled(fsdp: Fsdp) -> Module:
        return run_passes(schedule, module, partial(pipeline_of, fsdp=fsdp), None).module

    try:
        return residency.choose(module, compiled)
    except ResidencyError as error:
        raise TraceError(error.reason, loc=residency.loc, remedy=error.remedy) from None


def _run(
    schedule: Schedule | None, module: Module, pipeline_of: PipelineOf, sink: DumpSink | None
) -> Scheduled:
    if not isinstance(schedule, Schedule) or not is_search(schedule):
        return Scheduled(*run_on_copy(pipeline_of(schedule), module, sink), "")
    pipelines: list[Stages] = []

    def order(pipeline: Stages, **options: Any) -> Order:
        pipelines.append(pipeline)
        return schedule.order(pipeline, **options)

    watched = replace(schedule, order=order)
    copy, reports = run_on_copy(pipeline_of(watched), module, sink)
    choice = "\n".join(_choice(schedule, pipeline) for pipeline in dict.fromkeys(pipelines))
    return Scheduled(copy, reports, choice)


def _choice(schedule: Schedule, pipeline: Stages) -> str:
    """The choice of a search for a pipeline, and its reason."""
    orders = found_orders(schedule, pipeline)
    options = dict(schedule.options)
    number = min(options.get("choice", 0), len(orders) - 1)
    costs = options["costs"]
    why = (
        "" if costs is None else f"; its programs are the fastest on paper of {len(orders)} orders"
    )
    is_equal = costs is None or (costs.tf, costs.tb, costs.tw, costs.tcomm) == (1, 1, 1, 0)
    paid = "equal costs of all tasks" if is_equal else "the given costs"
    ranks = len(pipeline.ranks)
    shape = f"{pipeline.stages} stages on {ranks} ranks, {pipeline.microbatches} microbatches"
    return f"{schedule.name}, {shape}: {orders[number]}, with {paid}{why}"


def _why(error: IRError) -> str:
    """The rest of the circle besides the order that was tried, in one line."""
    notes = [note for diagnostic in error.diagnostics for note in diagnostic.notes]
    reasons = [note for note in notes if "by the order of" not in note.message]
    reasons.sort(key=lambda note: note.op is None or note.op.mb is not None)  # outside of the loop
    if not reasons:
        return "its tasks wait for each other"
    op = reasons[0].op
    return reasons[0].message if op is None else f"{reasons[0].message} ({op.loc})"


def _select_schedule(
    schedule: Schedule | None, module: Module, pipeline_of: PipelineOf
) -> Schedule | None:
    """The schedule, or, if that is a search with costs, the candidate that is fastest on paper.

    The search simulates orders of tasks; this simulates whole programs, with their messages,
    streams and slots. The choice is the same on all ranks, as it depends on nothing else.

    Args:
        schedule: as `default_pipeline` takes it.
        module: traced; it stays as it is.
        pipeline_of: the passes that compile it with a schedule.

    Raises:
        IRError, ValueError: as compiling does.
    """
    if not isinstance(schedule, Schedule):
        return schedule
    choices = candidates(schedule)
    if len(choices) == 1:
        return schedule
    costs = dict(schedule.options)["costs"]

    def makespan(candidate: Schedule) -> float:
        compiled, _ = run_on_copy(pipeline_of(candidate), module)
        return simulate_programs(compiled, costs).comparable_makespan

    return min(choices, key=makespan)
