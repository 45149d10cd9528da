"""Trace a step again, with forwards that save as little as a limit of memory needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ...ir.attributes import Action
from ...ir.location import Location
from ...ir.ops.module import Module
from ...ir.pipeline.costs import Costs
from ...ir.pipeline.tradeoff import Tradeoff
from ...ir.text.diagnostics import IRError
from ...ir.types import tensor_bytes
from ...passes.base import Pipeline
from ...passes.memory.choice_times import choice_time
from ...passes.memory.fit import NO_LIMIT, Fit, MemoryLimitError, fit
from ...passes.memory.offload import Offload
from ...passes.memory.saving_levels import HostMemory
from ...passes.memory.whole_backwards import may_be_whole, with_whole_backwards
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

    All ranks compile the same trials, and choose by nothing else. A search for an order is tried
    with less and less activations as well, and without W; the fastest on paper that fits is taken.

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
        whole: frozenset[int],
        amounts: Mapping[int, int],
    ) -> Module:
        module = traced(limits).module
        schedule = with_whole_backwards(schedule, whole)
        passes = partial(pipeline_of, offload=_offload(amounts, hosts, len(memory)))
        schedule = with_recomputation(schedule, plain.module, tradeoffs, limits)
        fsdp = choose_residency(options.fsdp, schedule, module, passes)
        return run_passes(schedule, module, partial(passes, fsdp=fsdp), None).module

    choice = ScheduleChoice(plain.module, tradeoffs, memory, hosts, compiled)
    try:
        schedule, fitted = choice.best(narrower(options.schedule, len(memory)))
    except MemoryLimitError as error:
        raise TraceError(error.reason, loc=loc, remedy=error.remedy) from None
    chosen = traced(fitted.limits)
    schedule = with_whole_backwards(schedule, fitted.whole)
    schedule = with_recomputation(schedule, plain.module, tradeoffs, fitted.limits)
    return FittedTrace(
        chosen,
        schedule,
        Fusing(chosen.bodies),
        "\n".join(filter(None, (fitted.report, report))),
        dict(fitted.limits),
        _offload(fitted.amounts, hosts, len(memory)),
    )


@dataclass(frozen=True)
class ScheduleChoice:
    """Chooses a schedule together with what its forwards save.

    Attributes:
        module: traced without limits.
        tradeoffs: the choices of its derivatives.
        memory: the limit of each rank, in bytes.
        hosts: the memory that tensors may move to.
        compiled: compiles the step with a schedule, and as `fit` has it.
    """

    module: Module
    tradeoffs: Mapping[str, Tradeoff]
    memory: Sequence[int]
    hosts: HostMemory
    compiled: Callable[..., Module]

    def best(self, schedules: Sequence[Schedule | None]) -> tuple[Schedule | None, Fit]:
        """The schedule that is fastest on paper within the memory.

        The first one is taken if it needs no limit. No schedule becomes faster by a limit, so those
        are left out whose time without one is not below that of the best.

        Args:
            schedules: such as hold less and less.

        Raises:
            MemoryLimitError: none keeps to the memory; of the last one.
            IRError, ValueError: as compiling the first one does.
        """
        fits: list[tuple[float, int, Fit]] = []
        errors: dict[int, MemoryLimitError] = {}
        for least, index in self._by_time(schedules):
            if fits and least >= min(fits)[0]:
                break
            schedule = schedules[index]
            try:
                fitted = self._fit(schedule)
            except MemoryLimitError as error:
                errors[index] = error
                continue
            if fitted.is_plain or len(schedules) == 1:
                return schedule, fitted
            fits.append((self._time(schedule, fitted), index, fitted))
        if not fits:
            raise errors[max(errors)]
        _, index, fitted = min(fits, key=lambda each: each[:2])
        return schedules[index], fitted

    def _by_time(self, schedules: Sequence[Schedule | None]) -> Iterator[tuple[float, int]]:
        """The time of each without a limit, and its number: the first one, then the fastest."""
        yield 0.0, 0
        times = []
        for index, schedule in enumerate(schedules[1:], 1):
            with suppress(IRError, ValueError):  # no order is within the bound of the search
                times.append((self._time(schedule, NO_LIMIT), index))
        yield from sorted(times)

    def _fit(self, schedule: Schedule | None) -> Fit:
        compiled = partial(self.compiled, schedule)
        may = may_be_whole(schedule)
        return fit(self.module.vjps, self.tradeoffs, self.memory, compiled, may, self.hosts)

    def _time(self, schedule: Schedule | None, fitted: Fit) -> float:
        """The time of a step on paper, in milliseconds."""
        module = self.compiled(schedule, fitted.limits, fitted.whole, fitted.amounts)
        limits, costs = fitted.limits, self.hosts.costs
        return choice_time(module, self.module.vjps, self.tradeoffs, limits, costs)


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
