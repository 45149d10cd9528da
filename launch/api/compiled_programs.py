"""The programs of a compiled step, and analyses of them that run nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...backends.base import World
from ...backends.failures.fallbacks import Fallbacks
from ...backends.program.linked import LinkedModule
from ...ir.location import Location
from ...ir.ops import Call, Collective, Recv, Send
from ...ir.ops.module import Channel, Module
from ...ir.pipeline.costs import Costs
from ...ir.text.printer import format_program
from ...ir.types import tensor_bytes
from ...passes.base import Pipeline
from ...passes.frontend.stored_values import Way, ways_of
from ...passes.manager.manager import DumpSink, PassReport
from ...passes.simulate.memory_plan import MemoryPlan, memory_plan
from ...passes.simulate.program_simulator import ProgramSimulation, simulate_programs
from ...passes.simulate.program_times import ProgramTimes
from ...passes.simulate.tasks_choice import choose_tasks
from ...tracer.record.trace import Trace
from ..cache.compile_cache import cache_of
from ..cache.program_entries import Scheduled
from ..pictures.compiled_picture import timeline_of, write_compiled
from ..runtime.plans_on_disk import write_plan
from .compile_options import CompileOptions
from .dumps import dump_reports, fallbacks_of, make_dump
from .fit_trace import FittedTrace
from .fusing import Fused
from .select_schedule import compile_module, costs_of

_LOG = logging.getLogger("cg")


@dataclass(frozen=True)
class PlanFacts:
    """The options of a compilation that a trace for its plan needs; they go into the plan's file.

    Attributes:
        fuse: as `compile` takes it.
        max_inflight: likewise; None if all ranks run the step together.
        remat: the actors that recompute since a search has chosen them.
        limits: the most bytes that forwards save, by derivative, where memory is limited.
        narrows: whether forwards save in a smaller type, where they can.
    """

    fuse: str | None
    max_inflight: int | None
    remat: tuple[str, ...]
    limits: Mapping[str, int] = field(default_factory=dict)
    narrows: bool = False


def make_variant(
    fit: FittedTrace,
    text: str,
    options: CompileOptions,
    pipeline_of: Callable[..., Pipeline],
    step: str,
    loc: Location | None,
    facts: PlanFacts,
    world: World,
    is_driven: bool,
) -> Variant:
    """Compile a trace; collective.

    Args:
        fit: the trace, with what keeps it to a limit of memory.
        text: of its module, with locations.
        options: with the schedule of the trace.
        pipeline_of: the passes for a schedule.
        step: the step's name.
        loc: its first line.
        facts: for the plan's file.
        world: all ranks.
        is_driven: whether one rank starts its executions.
    """
    trace = fit.trace
    dumped = make_dump(options, step, world)
    sink = dumped if dumped is not None and dumped.is_wanted else None
    if fit.offload is not None:
        pipeline_of = partial(pipeline_of, offload=fit.offload)
    if options.plan is not None:
        scheduled = Scheduled(options.plan.module, [], "")
    else:

        def compiled(pipeline_of: Callable[..., Pipeline], sink: DumpSink | None) -> Scheduled:
            own = None if is_driven or world.is_virtual else world.rank
            more = trace.module, text, pipeline_of, sink, cache_of(world), own
            return compile_module(options.fsdp, options.schedule, *more)

        limit, in_flight = options.memory_limit, options.in_flight if is_driven else 0
        limits = None if limit is None else limit.of_ranks(world.size, in_flight)
        scheduled = _with_tasks(compiled, pipeline_of, sink, options.tasks_in_flight, limits)
    module = scheduled.module
    if world.rank == 0:
        for remark in scheduled.remarks:
            _LOG.info("step %s: %s", step, remark)
    if sink is not None:
        sink.finish(module, scheduled.reports)
        if scheduled.choice:
            sink.add("schedule.txt", f"{scheduled.choice}\n")
        costs = costs_of(options.schedule) or options.tasks_in_flight
        if isinstance(costs, Costs):
            sink.add("costs.json", replace(costs, remat=()).to_json())
        dump_reports(trace, module, world, sink, is_driven)
    fallbacks = fallbacks_of(module, world, dumped)
    make_bodies = fit.fusing.plain if options.fuse is None else fit.fusing.apply
    fused = make_bodies(module, world)
    if sink is not None and options.fuse is not None:
        sink.add("fused.txt", fused.describe())
    return Variant(trace, scheduled, fused, fallbacks, loc, facts, fit.report)


def _with_tasks(
    compiled: Callable[[Callable[..., Pipeline], DumpSink | None], Scheduled],
    pipeline_of: Callable[..., Pipeline],
    sink: DumpSink | None,
    tasks: int | Costs | str,
    limits: Sequence[int] | None,
) -> Scheduled:
    """The programs with as many tasks in flight as `pipeline_of` says, or as costs choose.

    The choice is the same on all ranks, as it depends on nothing but the step and the options.
    """
    if not isinstance(tasks, Costs):
        return compiled(pipeline_of, sink)
    trials = [compiled(partial(pipeline_of, tasks_in_flight=n), None) for n in (1, 2)]
    number, said = choose_tasks(trials[0].module, trials[1].module, tasks, limits)
    chosen = trials[number - 1]
    if sink is not None:  # all passes are to be heard of
        chosen = compiled(partial(pipeline_of, tasks_in_flight=number), sink)
    return replace(chosen, choice="\n".join(filter(None, (chosen.choice, said))))


@dataclass(frozen=True)
class Variant:
    """A step, compiled for one signature.

    Attributes:
        trace: of the step.
        scheduled: its programs, and the reports of passes and of a search.
        fused: the bodies that its functions run.
        fallbacks: its graphs that are not replayed, as far as is known.
        loc: the step's first line.
        facts: on the options that the trace depends on.
        memory_report: what forwards save, where memory is limited; empty where it is not.
    """

    trace: Trace
    scheduled: Scheduled
    fused: Fused
    fallbacks: Fallbacks
    loc: Location | None
    facts: PlanFacts
    memory_report: str = ""

    @property
    def module(self) -> Module:
        """The scheduled module."""
        return self.scheduled.module

    def linked(self, seed: int) -> LinkedModule:
        """The module with the bodies, constants and seed that this process's ranks run it with."""
        constants = self.trace.constants
        fused = self.fused
        return LinkedModule(
            self.module, fused.bodies, constants, seed, self.fallbacks, fused.rank_bodies
        )

    @property
    def parameters(self) -> list[str]:
        """The names of the step's parameters, in order."""
        return [value.name for value in self.trace.module.program.params]

    def pick(self, driver: int) -> list[int] | None:
        """The index in the step's parameters of each of the driver's; None if both are the same."""
        names = self.parameters
        program_names = [value.name for value in self.module.program_of(driver).params]
        return None if program_names == names else [names.index(name) for name in program_names]

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The values of the step's parameters, if the actors are as they were traced."""
        trace = self.trace
        if trace.guards:
            trace.check_guards()
        return trace.inputs.flatten(args, kwargs)


@dataclass(frozen=True, slots=True)
class Cost:
    """Counts of one rank's program; bytes are those of tensors, objects count as none.

    Attributes:
        ops: all of them.
        calls: of functions.
        flops: floating-point operations of traced functions, as `Function.flops` counts them.
        messages_sent, bytes_sent: point to point.
        messages_received, bytes_received: point to point.
        collectives: that the rank takes part in.
        gathers, bytes_gathered: of parameters that actors store in pieces: the collectives, which
            are part of `collectives`, and what the rank receives by them.
        reductions, bytes_reduced: the same of the gradients of such parameters.
    """

    ops: int
    calls: int
    flops: int
    messages_sent: int
    bytes_sent: int
    messages_received: int
    bytes_received: int
    collectives: int
    gathers: int = 0
    bytes_gathered: int = 0
    reductions: int = 0
    bytes_reduced: int = 0


class Programs:
    """Every rank's schedule of a step, for each signature that it was compiled for.

    Attributes:
        variants: one for each signature that it was compiled for.
    """

    def __init__(self, variants: Sequence[Variant], world: World, driver: int | None) -> None:
        self.variants = tuple(variants)
        self._world = world
        self._driver = driver
        self._name = self.module.name

    def __repr__(self) -> str:
        ranks = self.module.world
        own = [rank for rank in range(ranks) if self._world.plays(rank)]
        ops = sum(len(self.module.program_of(rank).ops) for rank in own)
        where = f"{ranks} ranks" if len(own) == ranks else f"rank {own[0]} of {ranks}"
        shape = f"{ops} ops on {where}"
        if len(self.variants) > 1:
            shape += f", the first of {len(self.variants)} signatures"
        driven = "" if self._driver is None else f", driven from rank {self._driver}"
        return f"<cg.{type(self).__name__} {self._name}: {shape}{driven}>"

    @property
    def module(self) -> Module:
        """The scheduled module (of the first signature), the same on all ranks."""
        return self.variants[0].module

    def save(self, file: Path | str) -> None:
        """Write the schedule of every rank to a file, which `cg.load_plan` reads; collective.

        It is text that `cg-opt` reads, with the step as it was traced. Weights and the bodies of
        methods are not in it.

        Args:
            file: its name; rank 0 writes it. It appears when it is complete.

        Raises:
            OSError: rank 0 could not write it.
            ValueError: the step was compiled for several signatures.
        """
        if len(self.variants) > 1:
            raise ValueError(
                f"save() of {self._name} writes the plan of one signature, and it was compiled for "
                f"{len(self.variants)}: compile and save what Lowered.apart() returns one by one"
            )
        (variant,) = self.variants
        facts = asdict(variant.facts)
        write_plan(file, variant.module, variant.trace.module, facts, self._world)

    @property
    def reports(self) -> list[PassReport]:
        """The report of each pass (for the first signature)."""
        return self.variants[0].scheduled.reports

    @property
    def schedule_report(self) -> str:
        """The choices by times on paper, with reasons (for the first signature); else empty.

        Of the schedule `auto`, for each pipeline of the step a line: how far its makespan is above
        the lower bound of all orders, what share of the memory it takes, and where the order comes
        from. Then, where `tasks_in_flight` was chosen, a line with the number and both makespans.
        """
        return self.variants[0].scheduled.choice

    @property
    def memory_report(self) -> str:
        """The choice of `compile(memory=...)` (for the first signature); empty without it.

        For each rank a line with the bytes that its program holds at its peak, the limit, and the
        op; then a line for each forward: the bytes that it saves (on a mesh, those of whole
        tensors), and the work that its backward does again, as a share of the forward's.
        """
        return self.variants[0].memory_report

    @property
    def fused(self) -> dict[str, str]:
        """For each function that runs in this process, the reason why `fuse` has not compiled it.

        The reason is empty if it has. The result is empty if `fuse` was not given.
        """
        return dict(self.variants[0].fused.reasons)

    def uncaptured(self, variant: int = 0) -> dict[int, str]:
        """For each graph of this rank's program that its device does not replay, the reason.

        Keys are the numbers of graphs, which are the `graph` of their ops. A graph is captured in
        its third execution, so a failure to capture it is known after that. There is a warning,
        too, and a line in the dump's `graphs.txt`. The result is empty if all graphs can be
        captured, and on a rank without a device. The ops that are part of no graph are listed in
        `graphs.txt` alone.

        Args:
            variant: which of the signatures.
        """
        return dict(self.variants[variant].fallbacks.reasons)

    def as_text(self, rank: int | None = None, *, locations: bool = False, variant: int = 0) -> str:
        """The program of a rank, this process's by default.

        Raises:
            ValueError: there is no such rank.
        """
        chosen = self._world.rank if rank is None else rank
        program = self.variants[variant].module.program_of(chosen)
        return format_program(program, locations=locations)

    def memory_analysis(self) -> list[MemoryPlan]:
        """The bytes that each program holds at its peak, by the buffer plan, without weights.

        A graph has `max_inflight` times as much.
        """
        return [memory_plan(self.module, rank) for rank in range(self.module.world)]

    def cost_analysis(self) -> list[Cost]:
        """The calls, operations, messages and bytes of each rank's program, by rank."""
        return [cost_of(self.module, rank) for rank in range(self.module.world)]

    def simulate(
        self, costs: Costs | Path | str | None = None, *, variant: int = 0
    ) -> ProgramSimulation:
        """Run every rank's program on paper; `print` shows the result as a table.

        It has the makespan, the bubble, the communication that nothing hides, and for each rank
        its times and its peak of bytes by the buffer plan. Every rank gets the same result, and
        ranks need not call this together.

        Args:
            costs: in milliseconds and bytes: given, measured by `cg.measure`, or the name of a
                file that `Costs.save` has written. Without them each task of the schedule takes
                a millisecond, and nothing else takes any time.
            variant: which of the signatures.

        Raises:
            OSError: the file cannot be read.
            TypeError: `costs` are something else.
            ValueError: it does not hold costs, or they are for fewer stages.
        """
        if isinstance(costs, Path | str):
            costs = Costs.load(costs)
        if costs is not None and not isinstance(costs, Costs):
            raise TypeError(
                f"costs are {type(costs).__name__}; simulate() takes cg.Costs (what cg.measure() "
                "gives), the name of a file that Costs.save() has written, or None"
            )
        module = self.variants[variant].module
        return simulate_programs(module, Costs() if costs is None else costs)

    def visualize(
        self,
        path: Path | str,
        *,
        predicted: ProgramTimes | None = None,
        measured: ProgramTimes | None = None,
        variant: int = 0,
    ) -> None:
        """Draw the actor graph, and when the programs of all ranks run.

        The driver of a graph writes the file, and rank 0 that of any other step; on other ranks
        this does nothing, so all may call it.

        The graph has a band for each rank, a box for each call (those of all microbatches are
        one). Edges between ranks show type and transport. A collective is a box with its ranks.
        Where ranks hold parts of a tensor, boxes and edges show its layout. The timeline shows the
        times that are given; without any, each task and each other call of an actor takes a
        millisecond on paper.

        Args:
            path: ends in `.svg`, or in `.html` for a page with a timeline to zoom into.
            predicted: what `simulate` has returned.
            measured: one of the recordings that `record` has returned.
            variant: which of the signatures.

        Raises:
            ValueError: the path ends in something else.
        """
        if not self._world.plays(self._driver or 0):
            return
        module = self.variants[variant].module
        timeline = timeline_of(module, predicted, measured)
        traced = self.variants[variant].trace.module.functions
        write_compiled(module, timeline, self._transport_of, Path(path), traced)

    def _transport_of(self, channel: Channel) -> str:
        """The transport of a channel's messages, in words."""
        if channel.via is not None:
            return channel.via
        if self._world.is_virtual:
            return "in one process"
        machines = {self._world.nodes[rank] for rank in channel.ranks}
        return "shared memory" if len(machines) == 1 else "mpi"


def cost_of(module: Module, rank: int) -> Cost:
    """Count the work of one rank of a scheduled module."""
    ops = module.program_of(rank).ops
    calls = [op for op in ops if isinstance(op, Call)]
    sends = [op for op in ops if isinstance(op, Send)]
    receives = [op for op in ops if isinstance(op, Recv)]
    collectives = [op for op in ops if isinstance(op, Collective)]
    ways = ways_of(ops, module.functions)
    gathers = [op for op in collectives if ways.get(op.result) is Way.GATHERED]
    reductions = [op for op in collectives if ways.get(op.result) is Way.REDUCED]
    return Cost(
        ops=len(ops),
        calls=len(calls),
        flops=sum(module.functions[op.fn.name].flops.total for op in calls),
        messages_sent=len(sends),
        bytes_sent=sum(tensor_bytes(op.operands[0].type) for op in sends),
        messages_received=len(receives),
        bytes_received=sum(tensor_bytes(op.result.type) for op in receives),
        collectives=len(collectives),
        gathers=len(gathers),
        bytes_gathered=sum(map(_received, gathers)),
        reductions=len(reductions),
        bytes_reduced=sum(map(_received, reductions)),
    )


def _received(op: Collective) -> int:
    """Bytes that a rank receives from others: those that a gather adds, or a reduction removes."""
    own_bytes = sum(tensor_bytes(value.type) for value in op.operands)
    return abs(tensor_bytes(op.result.type) - own_bytes)
