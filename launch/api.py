"""What a user calls: steps, and what lowering, compiling and running them gives.

A `Step` is the decorated function, a `Lowered` is one trace of it, a `Compiled` is every rank's
schedule made from that trace, bound to the ranks that this process plays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, overload

from ..backends.base import World
from ..backends.statistics import Statistics
from ..ir.clone import clone
from ..ir.module import Module, Phase
from ..ir.printer import format_module, format_program
from ..ir.types import Place
from ..passes.manager import PassManager, PassReport
from ..passes.pipelines import default_pipeline
from ..passes.plan_buffers import MemoryPlan, memory_plan
from ..passes.registry import parse_switches
from ..passes.schedules import Schedule
from ..tracer.actors import ActorFactory
from ..tracer.functions import Functions
from ..tracer.step import trace_step
from ..tracer.trace import Trace, signature_of
from .analysis import Cost, cost_of
from .config import config
from .dumps import make_dump
from .runtime import make_runtime
from .world import world

T = TypeVar("T")

actor = ActorFactory(world)
"""Class decorator: lets instances live on one rank each; see `ActorFactory`."""


def on(*ranks: int) -> Place:
    """The place of the given ranks, for `inputs=` and `outputs=` of `cg.trace`."""
    return Place(ranks)


def barrier() -> None:
    """Wait until every rank has come here.

    Raises:
        TimeoutError: some rank has not come by the deadline (CG_TIMEOUT).
    """
    world().barrier()


def allgather(value: T) -> list[T]:
    """Give every rank the (picklable) values of all, by rank.

    Raises:
        TimeoutError: some rank has not come by the deadline (CG_TIMEOUT).
    """
    return world().allgather(value)


@overload
def trace(fn: Callable[..., Any]) -> Step: ...
@overload
def trace(
    *, inputs: Place | None = None, outputs: Place | None = None
) -> Callable[[Callable[..., Any]], Step]: ...
def trace(
    fn: Callable[..., Any] | None = None,
    *,
    inputs: Place | None = None,
    outputs: Place | None = None,
) -> Step | Callable[[Callable[..., Any]], Step]:
    """Decorator: make a Python function over actors a step that is compiled.

    Args:
        fn: the function. What it does is defined by running it eagerly, all actors in one process.
        inputs: the ranks whose arguments count; all, which then must be equal, if None.
        outputs: the ranks that get what it returns; all if None.
    """
    if fn is None:
        return lambda function: Step(function, inputs, outputs)
    return Step(fn, inputs, outputs)


class Step:
    """A function over actors, compiled for each signature that it is called with.

    Calling it is collective: every rank calls it, with arguments of the same types.
    `step.__wrapped__` is the plain Python function.
    """

    def __init__(
        self, fn: Callable[..., Any], inputs: Place | None = None, outputs: Place | None = None
    ) -> None:
        functools.update_wrapper(self, fn)
        self.__wrapped__ = fn
        self.__name__: str = getattr(fn, "__name__", type(fn).__name__)
        self._inputs = inputs
        self._outputs = outputs
        self._compiled: dict[tuple[Any, ...], Compiled] = {}
        self._compilations = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; the first call with a signature traces and compiles it.

        Returns:
            What the function returns; None on ranks that get no outputs.

        Raises:
            TraceError: the function, or a method that it calls, cannot be traced.
            IRError: the trace cannot be compiled.
            RemoteError: a method raised, on any rank; every rank raises it.
        """
        key = signature_of(args, kwargs)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self.lower(*args, **kwargs).compile()
        return compiled(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Trace the step for arguments like these; collective.

        Args:
            args, kwargs: tensors (only dtype, shape and `requires_grad` count), `cg.object` for
                Python objects, and Python constants.

        Raises:
            TraceError: the function, or a method that it calls, cannot be traced.
        """
        here = world()
        traced = trace_step(
            self.__wrapped__,
            args,
            kwargs,
            peers=here,
            inputs=self._inputs,
            outputs=self._outputs,
            name=self.__name__,
            tracer=Functions(),
        )
        return Lowered(self, traced, here)

    def _next_name(self) -> str:
        """What files of the next compilation are called."""
        self._compilations += 1
        suffix = "" if self._compilations == 1 else f"-{self._compilations}"
        return self.__name__ + suffix


class Lowered:
    """One trace of a step.

    Attributes:
        trace: the traced module, and what it takes to run it.
    """

    def __init__(self, step: Step, trace: Trace, world: World) -> None:
        self.trace = trace
        self._step = step
        self._world = world

    def as_text(self, phase: str = "traced", *, locations: bool = False) -> str:
        """The IR at a phase, compiled with the defaults as far as that phase.

        Args:
            phase: `traced`, `placed`, `async` or `scheduled`.
            locations: whether to print where in the source each op came from.

        Raises:
            ValueError: there is no such phase.
        """
        return format_module(self._module_at(Phase(phase)), locations=locations)

    def compile(
        self,
        *,
        schedule: Schedule | None = None,
        passes: str = "",
        dump: Path | str | None = None,
        seed: int | None = None,
        timeout: float | None = None,
    ) -> Compiled:
        """Make every rank's schedule, prove it, and bind it; collective.

        Args:
            schedule: how each rank orders its stages and microbatches; 1F1B if None.
            passes: optimisations to switch off and on by name, `-overlap,+ipc`; applied after
                those of CG_PASSES.
            dump: a directory to write the IR after every pass to; that of CG_DUMP if None.
            seed: of the random numbers that the step draws; CG_SEED if None.
            timeout: seconds that an execution may take; CG_TIMEOUT if None.

        Raises:
            IRError: the step cannot be compiled; the message shows the IR and the source line.
            PlanMismatch: the ranks have compiled different plans.
        """
        settings = config()
        switches = parse_switches(",".join(filter(None, (settings.passes, passes))))
        name = self._step._next_name()
        sink = make_dump(settings, None if dump is None else Path(dump), name, self._world.rank)
        module = clone(self.trace.module)
        manager = PassManager(default_pipeline(schedule, switches), dump=sink)
        reports = manager.run(module)
        if sink is not None:
            sink.finish(module, reports)
        return Compiled(
            self.trace,
            module,
            reports,
            self._world,
            seed=settings.seed if seed is None else seed,
            timeout=settings.timeout if timeout is None else timeout,
        )

    def _module_at(self, phase: Phase) -> Module:
        module = clone(self.trace.module)
        if module.phase is phase:
            return module
        pipeline = default_pipeline()
        reached = [index for index, p in enumerate(pipeline) if p.ensures is phase]
        PassManager(pipeline[: reached[0] + 1]).run(module)
        return module


class Compiled:
    """Every rank's schedule of a step, bound to the ranks that this process plays.

    Attributes:
        module: the scheduled module, the same on all ranks.
        reports: what each pass did.
    """

    def __init__(
        self,
        trace: Trace,
        module: Module,
        reports: list[PassReport],
        world: World,
        *,
        seed: int,
        timeout: float | None,
    ) -> None:
        self.module = module
        self.reports = reports
        self._trace = trace
        self._world = world
        self._runtime = make_runtime(
            world,
            module,
            [value.name for value in trace.module.program.params],
            trace.bodies,
            trace.constants,
            seed=seed,
            timeout=timeout,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on all ranks; collective.

        Returns:
            What the function returns; None on ranks that get no outputs.

        Raises:
            InputError: the arguments are not of the types that were traced; nothing was sent.
            RemoteError: a method or an op raised, on any rank; every rank raises it, and the step
                can be called again.
            StepTimeout: a rank has waited too long; the message says where every rank is.
            TransportError: a rank has ended.
        """
        outputs = self._runtime.run(lambda: self._inputs(args, kwargs))
        return None if outputs is None else self._trace.outputs.rebuild(outputs)

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        self._trace.check_guards()
        return self._trace.inputs.flatten(args, kwargs)

    def as_text(self, rank: int | None = None, *, locations: bool = False) -> str:
        """The program of a rank, this process's by default.

        Raises:
            ValueError: there is no such rank.
        """
        chosen = self._world.rank if rank is None else rank
        return format_program(self.module.program_of(chosen), locations=locations)

    def statistics(self, rank: int | None = None) -> Statistics:
        """What a rank that this process plays has measured of its executions.

        Raises:
            ValueError: another process plays that rank.
        """
        return self._runtime.statistics(self._world.rank if rank is None else rank)

    def memory_analysis(self) -> list[MemoryPlan]:
        """What each rank's program holds at its peak, by the buffer plan, without weights."""
        return [memory_plan(self.module, rank) for rank in range(self.module.world)]

    def cost_analysis(self) -> list[Cost]:
        """What each rank's program does: calls, messages and bytes, by rank."""
        return [cost_of(self.module, rank) for rank in range(self.module.world)]

    def close(self) -> None:
        """Give back the step's buffers; idempotent. It cannot be called after that."""
        self._runtime.close()
