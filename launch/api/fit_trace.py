"""Trace a step again, with forwards that save as little as a limit of memory needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ...ir.attributes import Action
from ...ir.location import Location
from ...ir.ops.module import Module
from ...ir.pipeline.costs import Costs
from ...ir.pipeline.tradeoff import Tradeoff
from ...ir.types import tensor_bytes
from ...passes.base import Pipeline
from ...passes.memory.early_weights import can_run_early, with_early_weights
from ...passes.memory.fit import MemoryLimitError, fit
from ...passes.memory.offload import Offload
from ...passes.memory.saving_levels import HostMemory
from ...passes.schedules import Schedule
from ...tracer.errors import TraceError
from ...tracer.function.step_pieces import StepPieces
from ...tracer.graph.autodiff.saved_tensors import SavingLimits
from ...tracer.record.trace import Trace
from ...tracer.torch_modes import Ambient
from .compile_options import CompileOptions
from .fusing import Fusing
from .select_schedule import (
    choose_residency,
    costs_of,
    narrower,
    run_passes,
    search_options,
    stages_of,
    with_options,
)

Example = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments and keyword arguments of a step."""


@dataclass(frozen=True)
class Again:
    """Traces a step once more, under the modes of torch that it was first traced under."""

    trace: Callable[..., Trace]
    modes: Ambient = field(default_factory=Ambient.now)

    def __call__(self, **options: Any) -> Trace:
        with self.modes.entered():
            return self.trace(**options)


@dataclass(frozen=True)
class FittedTrace:
    """A trace whose programs keep to a limit of memory.

    Attributes:
        trace: the trace.
        schedule: the schedule of its programs; None: 1F1B.
        fusing: makes its bodies.
        report: what its forwards save, in words; empty without a limit.
        limits: the most bytes that forwards save, by derivative; empty if they save all.
        offload: the pass that moves tensors to hosts; None: the default.
    """

    trace: Trace
    schedule: Schedule | None
    fusing: Fusing
    report: str = ""
    limits: Mapping[str, int] = field(default_factory=dict)
    offload: Offload | None = None


def fit_trace(
    plain: Trace,
    again: Again,
    options: CompileOptions,
    memory: Sequence[int],
    loc: Location | None,
    pipeline_of: Callable[..., Pipeline],
    hosts: HostMemory,
    known: SavingLimits,
) -> FittedTrace:
    """Trace a step so that its programs keep to the memory of each rank; collective.

    All ranks compile the same trials, and choose by nothing else. Where a search for an order has
    no bound on activations, and nothing fits, it searches with less and less of them.

    Args:
        plain: of the step without limits, which is the result if it keeps to the memory.
        again: traces the step; takes `limits` and `pieces`.
        options: the options of the compilation.
        memory: the limit of each rank, in bytes.
        loc: the step's first line.
        pipeline_of: the passes for a schedule.
        hosts: the memory that tensors may move to.
        known: says whether forwards save in a smaller type.

    Raises:
        TraceError: nothing that was tried keeps to the memory.
        IRError, ValueError: as the passes do.
    """
    pieces = StepPieces()
    asked = again(limits=known, pieces=pieces)
    tradeoffs = asked.tradeoffs
    traces: dict[tuple[tuple[str, int], ...], Trace] = {(): asked if known.narrows else plain}
    report = narrowed_report(plain.module, asked.module) if known.narrows else ""

    def traced(limits: Mapping[str, int]) -> Trace:
        key = tuple(sorted(limits.items()))
        if key not in traces:
            traces[key] = again(limits=known.to(limits), pieces=pieces)
        return traces[key]

    def compiled(
        schedule: Schedule | None,
        limits: Mapping[str, int],
        early: frozenset[int],
        amounts: Mapping[int, int],
    ) -> Module:
        module = traced(limits).module
        schedule = with_early_weights(schedule, early)
        passes = partial(pipeline_of, offload=_offload(amounts, hosts, len(memory)))
        schedule = with_recomputation(schedule, plain.module, tradeoffs, limits)
        fsdp = choose_residency(options.fsdp, schedule, module, passes)
        return run_passes(schedule, module, partial(passes, fsdp=fsdp), None).module

    errors: list[MemoryLimitError] = []
    for schedule in narrower(options.schedule, len(memory)):
        may_run_early = can_run_early(schedule)
        compile_trial = partial(compiled, schedule)
        try:
            fitted = fit(plain.module.vjps, tradeoffs, memory, compile_trial, may_run_early, hosts)
        except MemoryLimitError as error:
            errors.append(error)
            continue
        chosen = traced(fitted.limits)
        schedule = with_early_weights(schedule, fitted.early)
        schedule = with_recomputation(schedule, plain.module, tradeoffs, fitted.limits)
        return FittedTrace(
            chosen,
            schedule,
            Fusing(chosen.bodies),
            "\n".join(filter(None, (fitted.report, report))),
            dict(fitted.limits),
            _offload(fitted.amounts, hosts, len(memory)),
        )
    last = errors[-1]
    raise TraceError(last.reason, loc=loc, remedy=last.remedy)


def with_recomputation(
    schedule: Schedule | None,
    module: Module,
    tradeoffs: Mapping[str, Tradeoff],
    limits: Mapping[str, int],
) -> Schedule | None:
    """A search whose costs have the time of what backwards compute again.

    A backward takes the time of its forward more, in the share of its work that is done again. A
    search without costs has all tasks take as long as a forward, and that share comes on top.

    Args:
        schedule: as `default_pipeline` takes it.
        module: traced without limits.
        tradeoffs: the choices of its derivatives.
        limits: the most bytes that forwards save, by derivative.
    """
    if schedule is None or not search_options(schedule) or not limits:
        return schedule
    known = costs_of(schedule)
    costs = Costs() if known is None else known
    shares = {name: tradeoffs[name].share_within(limit) for name, limit in limits.items()}
    functions = dict(costs.functions)
    for name, share in shares.items():
        vjp = module.vjps[name]
        for backward in {vjp.backward, vjp.input or vjp.backward}:
            if backward in functions and vjp.forward in functions:
                functions[backward] += share * functions[vjp.forward]
    actors = stages_of(module)[0].actors
    backward_times = []
    for stage, actor in enumerate(actors):
        names = [
            n for n, vjp in module.vjps.items() if module.functions[vjp.forward].actor == actor
        ]
        works = {name: tradeoffs[name].work for name in names if name in tradeoffs}
        again = sum(shares.get(name, 0.0) * work for name, work in works.items())
        extra = again / max(1, sum(works.values())) * costs.of(Action.FORWARD, stage, True)
        backward_times.append(costs.of(Action.BACKWARD, stage, True) + extra)
    costs = replace(costs, functions=functions, tb=tuple(backward_times))
    # Without costs of the user, programs are not compared: the best order of tasks is taken.
    return with_options(schedule, costs=costs, **({"choice": 0} if known is None else {}))


def narrowed_trace(plain: Trace, narrow: Trace, schedule: Schedule | None) -> FittedTrace:
    """A trace whose forwards save in a smaller type, without a limit of memory."""
    report = narrowed_report(plain.module, narrow.module)
    return FittedTrace(narrow, schedule, Fusing(narrow.bodies), report)


def narrowed_report(plain: Module, narrow: Module) -> str:
    """Describe the bytes that derivatives save in bfloat16, a line for each.

    Args:
        plain: a traced module that saves tensors as they are.
        narrow: the same with smaller types, where that is allowed.
    """
    lines = []
    for name, vjp in sorted(narrow.vjps.items()):
        before, after = (_saved_bytes(module, vjp.forward) for module in (plain, narrow))
        lines.append(f"@{name}: saves {after:,} bytes instead of {before:,}, rounded to bfloat16")
    return "\n".join(lines)


def _saved_bytes(module: Module, forward: str) -> int:
    """The bytes of what a forward gives, without those of what it is given."""
    function = module.functions[forward]
    shared = {output for output, _ in function.aliases}
    return sum(tensor_bytes(type_) for i, type_ in enumerate(function.outputs) if i not in shared)


def _offload(amounts: Mapping[int, int], hosts: HostMemory, ranks: int) -> Offload:
    """The pass that moves so much on each rank."""
    listed = "+".join(str(amounts.get(rank, 0)) for rank in range(ranks))
    return Offload(amounts=listed if any(amounts.values()) else "", costs=hosts.costs)
