"""A lowered step: its traces, which `compile` makes every rank's schedule from."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ...backends.base import World
from ...ir.phases import Phase
from ...ir.pipeline.costs import Costs, Link
from ...ir.text.printer import format_module
from ...passes.base import Pipeline
from ...passes.lower.fuse import Fuse
from ...passes.manager.pipelines import run_to
from ...passes.placement.choose_dispatch import Dispatch
from ...passes.schedules import Schedule
from ...passes.simulate.residency import Residency
from ...passes.simulate.stage_memory import recomputable
from ...tracer.graph.autodiff.saved_tensors import SavingLimits
from ...tracer.method.binding import definition
from ...tracer.record.actors.undo import Undo
from ...tracer.record.collector import collector_paused
from ...tracer.record.trace import Trace
from ..runtime.agreement import check_compilation, check_fuse, check_memory
from ..runtime.numbering import Definition, Numbering
from ..runtime.step_lock import lock_of
from ..world.communicators import check_transports
from ..world.devices import fabrics_of
from ..world.world import check_late_settings
from .compile_options import CompileOptions
from .compiled import Compiled
from .compiled_programs import PlanFacts, make_variant
from .fit_trace import Again, Example, FittedTrace, fit_trace, narrowed_trace
from .fusing import Fusing
from .optimistic import Optimistic
from .parameter_names import check_keywords
from .select_schedule import (
    check_costs,
    choose_remat,
    costs_of,
    refuse_two_limits,
    run_passes,
    wants_costs,
    wants_memory,
    wants_remat,
    with_costs,
    with_host_link,
    with_memory,
)

_LOG = logging.getLogger("cg")


class Lowered:
    """One trace of a step, or several for as many signatures.

    Attributes:
        traces: the traced modules, with bodies, constants and guards.
    """

    def __init__(
        self,
        step: Definition,
        traces: Sequence[Trace],
        world: World,
        again: Sequence[Again] = (),
        example: Example | None = None,
        remat: frozenset[str] = frozenset(),
        limits: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.traces = tuple(traces)
        self._step = step
        self._world = world
        self._again = tuple(again)
        self._example = example
        self._remat, self._limits = remat, limits
        self._fused: Lowered | None = None
        self._fusing = [Fusing(trace.bodies) for trace in traces]

    def __repr__(self) -> str:
        count = len(self.traces)
        traced = f"traced for {count} signature{'s' * (count != 1)}"
        return f"<cg.Lowered {self._step.name}: {traced}, {self._world.size} ranks>"

    @property
    def trace(self) -> Trace:
        """The first of the traces."""
        return self.traces[0]

    def apart(self) -> tuple[Lowered, ...]:
        """The traces one by one, each to be compiled as a program of its own."""
        again = [self._again[i : i + 1] for i in range(len(self.traces))]
        return tuple(
            Lowered(self._step, [trace], self._world, retrace, self._example)
            for trace, retrace in zip(self.traces, again, strict=True)
        )

    def as_text(self, phase: str = "traced", *, locations: bool = False, variant: int = 0) -> str:
        """The IR at a phase, compiled with the defaults up to that phase.

        Args:
            phase: `traced`, `placed`, `async` or `scheduled`.
            locations: True to print where in the source each op came from.
            variant: which of the signatures.

        Raises:
            ValueError: there is no such phase.
        """
        phases = [member.value for member in Phase]
        if phase not in phases:
            raise ValueError(f"as_text({phase!r}): the phases are {', '.join(phases)}")
        module = run_to(Phase(phase), self.traces[variant].module)
        return format_module(module, locations=locations)

    def compile(
        self,
        *,
        schedule: Schedule | None = None,
        passes: str = "",
        dump: Path | str | None = None,
        seed: int | None = None,
        timeout: float | None = None,
        max_inflight: int = 8,
        fuse: str | None = None,
        fsdp: Residency | None = None,
        check_inputs: bool | int | None = None,
        dispatch: Dispatch = "auto",
        memory: str | int | Sequence[str | int] | None = None,
        costs: Costs | None = None,
        host_link: Link | None = None,
        saved: str | None = None,
        tasks_in_flight: int | Costs | Literal["auto"] = 1,
    ) -> Compiled:
        """Make every rank's schedule, prove it, and bind it; collective.

        Args:
            schedule: how each rank orders its stages and microbatches; 1F1B if None.
            passes: optimisations to switch off by name, `-overlap,-cse`, or on again by `+name`
                after CG_PASSES has switched them off.
            dump: a directory to write the IR after every pass to; that of CG_DUMP if None.
            seed: of the random numbers that the step draws; CG_SEED if None.
            timeout: seconds that a call on all ranks may take; CG_TIMEOUT if None. Also the seconds
                that `execute` waits while `max_inflight` executions are in flight; if None,
                CG_TIMEOUT where that is set, and else no limit. An execution itself is limited by
                `result(timeout)` alone, but `close` waits no longer than `timeout` for executions
                that do not move.
            max_inflight: of a step with `inputs=cg.on(rank)`: how many of its executions may be in
                flight; each has registers and channels of its own on all ranks.
            fuse: `inductor` has TorchInductor compile the graphs of traced methods and of their
                backwards to fused kernels, on all ranks. Values are then equal up to rounding.
                `compiled.fused` says what is compiled. A step with a backward is traced once more
                for that: backwards compute cheap results again, and less is kept for them.
            fsdp: for how long parameters stay gathered that actors store in pieces (`store=`), as
                `cg.fsdp(...)` says; None: gathered for each forward and each backward.
            check_inputs: of a step whose `inputs` are several ranks: when to compare what they
                give, by a digest of each argument, before the execution runs. None: in the first
                three executions, in each whose number is a power of two, and in every 512th; True:
                in each; an int n: in every n-th; False: in none.
            dispatch: of experts that are cut over ranks: `gather` lets all tokens travel to all of
                these ranks, `exchange` only to those that have one of their experts, and `auto`
                takes the exchange where it saves enough bytes and no device is at the ranks.
            memory: the most bytes that the program of each rank may hold at its peak, as
                `memory_analysis()` counts them: without what actors keep. An int, or a text such as
                `40GiB`; or a list of one for each rank. Where it is short, backwards compute some
                values of their forwards again, on each rank as many as it needs, with the same
                bits, and devices move some to their hosts while they rest. `compiled.memory_report`
                says what is saved. None: any number.
            costs: the times of functions on the user's devices, as `cg.measure` gives them, by
                which it is chosen what is computed again and what rests on hosts. None: those of
                the schedule, if it is a search with costs; others are estimated.
            host_link: between a device and its host, for the same choice: its latency and bandwidth
                in one direction. None: as `costs.host`, or what its kind of device has.
            saved: `bf16` lets forwards save float32 and float64 tensors in bfloat16, where that
                takes fewer bytes: gradients are those of rounded activations. `memory_report` says
                how many bytes that are. None: each in its own type.
            tasks_in_flight: how many tasks a rank may have begun that have not ended. With 2 it
                computes for the next task of its schedule while an exchange of a task travels, for
                instance that of experts' rows. Results are the same bits; a rank may hold the
                activations of one more microbatch. `auto` takes 1 or 2, whichever is faster on
                paper by the costs of the schedule, or else by `costs`, or by those that a run of
                the step measures, whose effects are undone; `cg.Costs` are given ones.
                `schedule_report` says why.

            All but `dump` and `timeout` must be equal on all ranks.

        Raises:
            FuseError: the compiler, or a part that it needs, is missing.
            IRError: the step cannot be compiled; the message shows the IR and the source line.
            PlanMismatch: the ranks have compiled different plans.
            TraceError: a parameter of a step with `inputs=cg.on(rank)` has the name of a keyword of
                `execute`; or `fsdp` does not fit the step; or its memory, or `memory`, does not
                suffice.
            TypeError: `max_inflight`, `seed` or `check_inputs` is no integer, `timeout` no number,
                `passes` no string, `costs` no `cg.Costs`, or `host_link` no `cg.Link`.
            ValueError: `max_inflight` or `check_inputs` is less than 1, `timeout` is not above 0,
                `tasks_in_flight` is less than 1, `memory` is no number of bytes, or there is no
                such `fuse` or `dispatch`.
        """
        if not isinstance(max_inflight, int) or isinstance(max_inflight, bool):
            raise TypeError(
                f"max_inflight={max_inflight!r}: it is the number of executions of "
                f"{self._step.name} that may be in flight, an int of at least 1"
            )
        options = CompileOptions(
            schedule=schedule,
            passes=passes,
            dump=dump,
            seed=seed,
            timeout=timeout,
            max_inflight=max_inflight,
            fuse=fuse,
            fsdp=fsdp,
            check_inputs=check_inputs,
            dispatch=dispatch,
            memory=memory,
            costs=costs,
            host_link=host_link,
            saved=saved,
            tasks_in_flight=tasks_in_flight,
        )
        if memory is not None:
            refuse_two_limits(schedule)
        if schedule is not None and wants_costs(schedule):
            measure = functools.partial(self._measure, options)
            schedule = with_costs(schedule, measure, self._world)
        check_costs(schedule)
        schedule = with_host_link(schedule, host_link)
        if tasks_in_flight == "auto":
            known = costs_of(schedule) or costs or self._measure(options, schedule)
            options = replace(options, tasks_in_flight=known)
        with lock_of(self._world).held(self._step.name):
            lowered = self._for_fusing(options)
            if schedule is not None and wants_memory(schedule):
                schedule = with_memory(schedule, [trace.module for trace in lowered.traces])
            if schedule is not None and wants_remat(schedule):
                lowered, schedule = lowered._rematerialized(schedule)
            options = replace(options, schedule=schedule)
            fitted = lowered._within_memory(options)
            return lowered._compile(options, self._step.number(), fitted)

    def fuse_ahead(self, fuse: str, *, passes: str = "", max_inflight: int = 8) -> None:
        """Have a compiler make this rank's kernels, which `compile` with these options then takes.

        It is not collective. A thread may do it while this one executes graphs, and traces none.

        Raises:
            FuseError, ValueError: as `compile`; or the step has a backward.
        """
        if any(trace.module.vjps for trace in self.traces):
            raise ValueError(f"step {self._step.name} has a backward: compile() alone can fuse it")
        options = CompileOptions(passes=passes, max_inflight=max_inflight, fuse=fuse)
        for trace, fusing in zip(self.traces, self._fusing, strict=True):
            scheduled = run_passes(None, trace.module, self._pipeline_of(options), None)
            fusing.make(scheduled.module, self._world)

    def compile_optimistic(
        self,
        *,
        schedule: Schedule | None = None,
        passes: str = "",
        seed: int | None = None,
        timeout: float | None = None,
        fsdp: Residency | None = None,
        check_inputs: bool | int | None = None,
        dispatch: Dispatch = "auto",
        tasks_in_flight: int = 1,
    ) -> Optimistic:
        """As `compile`, for a step that clips gradients and goes on; collective.

        The result is called like that of `compile`, and gives the same bits. Calls of
        `cg.clip_grad_norm` hold nothing up in it: see `Optimistic`. It pays where a step goes on
        after them, with the microbatches of the next update, and gradients are seldom clipped. It
        traces the step once more, and keeps a copy of all that the actors hold.

        Args:
            schedule, passes, seed, timeout, fsdp, check_inputs, dispatch, tasks_in_flight: as in
                `compile`; `tasks_in_flight` is a number here.

        Raises:
            TraceError, IRError, PlanMismatch: as in `lower` and `compile`.
            ValueError: the step was lowered for several signatures.
        """
        if self._example is None:
            raise ValueError("compile_optimistic() is for a step that lower() has traced")
        if wants_remat(schedule):
            raise ValueError(
                "compile_optimistic() keeps the stages as they are traced; compile() chooses those "
                "that recompute, and cg.remat(actor.method) in the step says it for both"
            )
        if not isinstance(tasks_in_flight, int):
            raise TypeError(
                f"tasks_in_flight={tasks_in_flight!r}: a number here; compile() chooses one, and "
                "its schedule_report says which"
            )
        options = CompileOptions(
            schedule=schedule,
            passes=passes,
            seed=seed,
            timeout=timeout,
            fsdp=fsdp,
            check_inputs=check_inputs,
            dispatch=dispatch,
            tasks_in_flight=tasks_in_flight,
        )
        with lock_of(self._world).held(self._step.name):
            bold = Lowered(self._step, [self._again[0](optimistic=True)], self._world)
            numbering = self._step.number()
            plain, bold_program = (lowered._compile(options, numbering) for lowered in (self, bold))
            return Optimistic(plain, bold_program, self._world, numbering)

    def _measure(self, options: CompileOptions, schedule: Schedule | None) -> Costs:
        """Measure the step on the arguments that it was lowered for, and undo its effects."""
        if self._example is None or self._step.driver is not None:
            raise ValueError(
                f"step {self._step.name} is driven from one rank, or lowered for several "
                "signatures, so compile cannot run it; measure its costs with cg.measure, and give "
                "them: cg.schedules.auto(costs=costs), or tasks_in_flight=costs"
            )
        args, kwargs = self._example
        undo = Undo(self.trace.instances)
        compiled = self.compile(
            schedule=schedule,
            passes=options.passes,
            seed=options.seed,
            timeout=options.timeout,
            dispatch=options.dispatch,
            tasks_in_flight=options.tasks_at_first,
        )
        with compiled:
            undo.remember()
            try:
                return compiled.measure(*args, **kwargs)
            finally:
                undo.restore()

    def _for_fusing(self, options: CompileOptions) -> Lowered:
        """The step with backwards for fused kernels, if a compiler makes any; collective.

        A trace decides what is kept for a backward, so the step is traced once more.
        """
        check_fuse(self._world, self._step.name, options.fuse)
        has_backward = any(trace.module.vjps for trace in self.traces)
        if options.fuse is None or not has_backward or Fuse.name in options.switches.off:
            return self
        if self._fused is None:
            again = [
                replace(retrace, trace=functools.partial(retrace.trace, fused=True))
                for retrace in self._again
            ]
            traces = [retrace() for retrace in again]
            self._fused = Lowered(self._step, traces, self._world, again, self._example)
        return self._fused

    def _rematerialized(self, schedule: Schedule) -> tuple[Lowered, Schedule]:
        """The step in which the stages that a search chooses recompute, and the search for it."""
        if self._example is None:
            raise ValueError(
                f"step {self._step.name} is lowered for several signatures, so auto(remat=True) "
                "cannot trace it again; use cg.remat(actor.method) in the step"
            )
        (again,) = self._again
        module = self.trace.module
        every = again(remat=recomputable(module))
        schedule, actors = choose_remat(schedule, module, every.module)
        if not actors:
            return self, schedule
        return self._recomputing(actors), schedule

    def _recomputing(self, actors: frozenset[str]) -> Lowered:
        """The step in which the actors recompute that a search has chosen."""
        (again,) = self._again
        return Lowered(self._step, [again(remat=actors)], self._world, remat=actors)

    def _for_plan(self, facts: PlanFacts) -> Lowered:
        """The step as the trace of a plan has it."""
        if facts.remat:
            return self._recomputing(frozenset(facts.remat))
        if not (facts.limits or facts.narrows):
            return self
        (again,) = self._again
        trace = again(limits=SavingLimits(facts.limits, facts.narrows))
        return Lowered(self._step, [trace], self._world, limits=facts.limits)

    def _within_memory(self, options: CompileOptions) -> list[FittedTrace]:
        """The traces whose forwards save as little as the memory needs; collective."""
        agreed = options.agreed()["memory"]
        check_memory(
            self._world, self._step.name, (agreed, options.saved) if options.saved else agreed
        )
        limit, known = options.memory_limit, SavingLimits(narrows=options.saved is not None)
        if limit is None and not known.narrows:
            return self._as_traced(options)
        if limit is None:
            return [
                narrowed_trace(trace, again(limits=known), options.schedule)
                for trace, again in zip(self.traces, self._again, strict=True)
            ]
        in_flight = options.in_flight if self._driver(options) is not None else 0
        memory = limit.of_ranks(self._world.size, in_flight)
        more = options, memory, definition(self._step.fn), self._pipeline_of(options)
        hosts = options.hosts(fabrics_of(self._world), self._driver(options) is not None)
        return [
            fit_trace(trace, again, *more, hosts, known)
            for trace, again in zip(self.traces, self._again, strict=True)
        ]

    def _as_traced(self, options: CompileOptions) -> list[FittedTrace]:
        """The traces without a limit of memory."""
        pairs = zip(self.traces, self._fusing, strict=True)
        schedule, limits = options.schedule, self._limits
        return [FittedTrace(trace, schedule, fusing, limits=limits) for trace, fusing in pairs]

    def _driver(self, options: CompileOptions) -> int | None:
        """The rank that starts executions; None if all ranks run them together."""
        return None if options.max_inflight is None else self._step.driver

    def _pipeline_of(self, options: CompileOptions) -> Callable[..., Pipeline]:
        """The passes for a schedule."""
        return options.pipeline_of(fabrics_of(self._world), self._driver(options) is not None)

    @collector_paused()
    def _compile(
        self,
        options: CompileOptions,
        numbering: Numbering,
        fitted: Sequence[FittedTrace] | None = None,
    ) -> Compiled:
        fitted = self._as_traced(options) if fitted is None else fitted
        traces, driver = [fit.trace for fit in fitted], self._driver(options)
        for trace in traces:
            check_transports(trace.module.program)
            if driver is not None:
                check_keywords(self._step.fn, trace.inputs, Compiled.execute)
        check_late_settings(options.settings)
        texts = [format_module(trace.module, locations=True) for trace in traces]
        check_compilation(self._world, self._step.name, traces, texts, options.agreed())
        pipeline_of, narrows = self._pipeline_of(options), options.saved is not None
        variants = []
        for fit, text in zip(fitted, texts, strict=True):
            loc, remat = definition(self._step.fn), tuple(sorted(self._remat))
            facts = PlanFacts(options.fuse, options.max_inflight, remat, dict(fit.limits), narrows)
            more = self._step.name, loc, facts, self._world, driver is not None
            chosen = replace(options, schedule=fit.schedule)
            variants.append(make_variant(fit, text, chosen, pipeline_of, *more))
        return Compiled(variants, self._world, options, driver, numbering)
