"""What a user calls: steps, and what lowering, compiling and running them gives.

A `Step` is the decorated function, a `Lowered` is one trace of it, a `Compiled` is every rank's
schedule made from that trace, bound to the ranks that this process plays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from ...backends.agreement.gather import gather
from ...backends.base import World
from ...backends.driven.device_only import is_sealed
from ...backends.failures.fallbacks import Fallbacks
from ...backends.program.fuse import check_name
from ...ir.clone import clone
from ...ir.module import Module, Phase
from ...ir.pipeline.costs import Costs
from ...ir.printer import format_module
from ...ir.types import Place
from ...passes.lower.capture import describe
from ...passes.manager import PassManager
from ...passes.pipelines import default_pipeline
from ...passes.registry import parse_switches
from ...passes.schedules import Schedule
from ...tracer.actors.actors import ActorFactory
from ...tracer.functions.functions import Functions
from ...tracer.step.step import definition, trace_step
from ...tracer.step.trace import InputError, Trace, signature_of
from ..config import config
from ..runtime.driven_graphs import check_outside
from ..world.agreement import Asked, check_compilation
from ..world.communicators import check_transports
from ..world.comparison import interval
from ..world.devices import fabrics_of, torch_device
from ..world.world import check_late_settings, world
from .compiled import Compiled
from .dumps import Dump, make_dump
from .fusing import Fusing
from .numbering import Numbering, check_state
from .optimistic import Optimistic
from .option_checks import check_keywords, check_options
from .select_schedule import run_passes
from .turns import turn_of
from .variant import Variant

T = TypeVar("T")

actor = ActorFactory(world, lambda: torch_device(world()))
"""Class decorator: lets instances live on one rank each; see `ActorFactory`."""


def on(*ranks: int) -> Place:
    """The place of the given ranks, for `inputs=` and `outputs=` of `cg.trace`.

    Raises:
        TypeError: a rank is no integer.
        ValueError: there is none, or one is negative, or is there twice.
    """
    shown = f"cg.on({', '.join(map(repr, ranks))})"
    if not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in ranks):
        raise TypeError(f"{shown}: ranks are integers, as in cg.on(0) or cg.on(0, 1)")
    if any(rank < 0 for rank in ranks):
        raise ValueError(f"{shown}: ranks count from 0")
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
        PlanMismatch: a rank traces or compiles a step instead.
    """
    return gather(world(), "cg.allgather", value)


def measure(
    compiled: Compiled, /, *args: Any, executions: int | None = None, **kwargs: Any
) -> Costs:
    """Find out what a compiled step costs, by running it on all ranks; collective.

    Each call is timed around its function, and messages of two sizes go back and forth over each
    edge that the step uses. The result says what each function and each channel takes, for
    `compiled.simulate`, and what F, B and W of each stage and the transfers between stages take,
    for `cg-sim --costs` and `cg.schedules.auto`. On a rank with a device times are those of its
    compute stream, otherwise of the host.

    Args:
        compiled: what is measured, on its ranks as they are now. Where its schedule does not split
            backwards, `tb` is all of them.
        args, kwargs: as the step takes them.
        executions: how often the step runs, besides once to warm up; 5 times if None. It does all
            that it does when it is called, so an update of weights is one. If the step itself has
            a parameter of that name, write `compiled.repeated(5).measure(...)`.

    Returns:
        The same costs on all ranks; `Costs.save` writes them to a file.

    Raises:
        As calling the step does.
        TypeError: `executions` may be meant for the step.
        ValueError: it is less than 1.
    """
    return compiled.measure(*args, executions=executions, **kwargs)


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

    Raises:
        TypeError: `inputs` or `outputs` is not what `cg.on` gives, or `fn` is no function.
    """
    if not (fn is None or callable(fn) or hasattr(fn, "__get__")):
        raise TypeError(f"cg.trace decorates a function over actors, not {fn!r}")
    _check_place("inputs", inputs)
    _check_place("outputs", outputs)
    if fn is None:
        return lambda function: Step(function, inputs, outputs)
    return Step(fn, inputs, outputs)


def _check_place(what: str, place: object) -> None:
    if place is None or isinstance(place, Place):
        return
    ranks = place if isinstance(place, (list, tuple)) else [place]
    written = ", ".join(map(str, ranks)) if all(type(rank) is int for rank in ranks) else "0"
    raise TypeError(
        f"cg.trace({what}={place!r}): {what} names ranks by cg.on, as in "
        f"@cg.trace({what}=cg.on({written}))"
    )


class Step:
    """A function over actors, compiled for each signature that it is called with.

    Calling it is collective: every rank calls it, with arguments of the same types.
    `step.__wrapped__` is the plain Python function. A decorated method is a step for each object,
    which counts as a constant.
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
        self._numbering = Numbering()

    def __get__(self, instance: object, owner: type | None = None) -> Step:
        """The step of one object, where a method is decorated; made when it is first asked for."""
        if instance is None:
            return self
        steps: dict[str, Any] = vars(instance)
        bound = steps.get(self.__name__)
        if not isinstance(bound, Step):
            method = self.__wrapped__.__get__(instance, owner)
            bound = steps[self.__name__] = Step(method, self._inputs, self._outputs)
        return bound

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the step; the first call with a signature traces and compiles it.

        Returns:
            What the function returns; None on ranks that get no outputs.

        Raises:
            TraceError: the function, or a method that it calls, cannot be traced.
            IRError: the trace cannot be compiled.
            InputError: the step cannot take the arguments, or ranks are found to give others.
            PlanMismatch: ranks call different steps, or this one with arguments of other types.
            RemoteError: a method raised, on any rank; every rank raises it.
        """
        try:
            key = signature_of(args, kwargs)
        except InputError:
            self.lower(*args, **kwargs)  # which tells the other ranks
            raise
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compile_for(key, args, kwargs)
        return compiled(*args, **kwargs)

    def _compile_for(
        self, key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Compiled:
        """Compile the step for a signature, unless another thread has meanwhile."""
        with turn_of(world()).taken(self.__name__):
            compiled = self._compiled.get(key)
            if compiled is None:
                compiled = self.lower(*args, **kwargs)._compile(self._numbering)
                self._compiled[key] = compiled
        return compiled

    def state_dict(self) -> dict[str, int]:
        """What random numbers of the step's calls depend on; see `Compiled.state_dict`.

        It counts the calls with all signatures, also those before `clear_cache`, and nothing of
        what `lower(...).compile()` has returned, which has a state of its own.
        """
        return {"seed": config().seed, "calls": self._numbering.next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, before or after the first call; see `Compiled.load_state_dict`."""
        check_state(world(), self.__name__, state, config().seed, ("calls",))
        self._numbering.next = state["calls"]

    def clear_cache(self) -> None:
        """Forget what calls have compiled, so that the next call traces again; on all ranks.

        Needed when an actor has changed in a way that the trace relied on, such as by `eval()`.
        What `lower(...).compile()` has returned is not affected.
        """
        for compiled in self._compiled.values():
            compiled.close()
        self._compiled.clear()

    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered:
        """Trace the step for arguments like these; collective.

        Args:
            args, kwargs: tensors (only dtype, shape and `requires_grad` count), `cg.object` for
                Python objects, and Python constants.

        Raises:
            InputError: the step does not take these arguments.
            TraceError: the function, or a method that it calls, cannot be traced.
        """
        again = functools.partial(self._trace, args, kwargs, optimistic=True)
        return Lowered(self, [self._trace(args, kwargs)], world(), again)

    def lower_many(self, signatures: Sequence[Any]) -> Lowered:
        """Trace the step for each of several sets of arguments; collective.

        Compiled, they are one graph: each call takes the variant that fits its arguments.

        Args:
            signatures: for each variant a tuple of positional arguments, a dictionary of keyword
                arguments, or the one argument; otherwise as in `lower`.

        Raises:
            InputError: the step does not take one of the sets.
            TraceError: the function, or a method that it calls, cannot be traced.
            TypeError: `signatures` is no list, tuple or other sequence.
            ValueError: there is no signature.
        """
        if not isinstance(signatures, Sequence) or isinstance(signatures, (str, bytes)):
            raise TypeError(
                f"lower_many() of {self.__name__} takes a list with an entry for each set of "
                f"arguments, and was given a value of type {type(signatures).__name__}; for a "
                "single set use lower()"
            )
        if not signatures:
            raise ValueError(f"lower_many() of {self.__name__} takes at least one set of arguments")
        traces = [self._trace_entry(index, given) for index, given in enumerate(signatures)]
        return Lowered(self, traces, world())

    def _trace_entry(self, index: int, given: Any) -> Trace:
        """The trace for one of the sets of arguments that `lower_many` takes."""
        args, kwargs = given if isinstance(given, tuple) else (given,), {}
        if isinstance(given, dict):
            args, kwargs = (), given
        try:
            return self._trace(args, kwargs)
        except InputError as error:
            raise InputError(f"entry {index} of lower_many(): {error}") from None

    def _trace(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], optimistic: bool = False
    ) -> Trace:
        here = world()
        check_outside(here, self.__name__)
        asked = Asked(self.__name__, self.__wrapped__, self._inputs, self._outputs, optimistic)
        with turn_of(here).taken(self.__name__, tracing=True):
            asked.check(here, args, kwargs)
            return trace_step(
                self.__wrapped__,
                args,
                kwargs,
                peers=here,
                inputs=self._inputs,
                outputs=self._outputs,
                name=self.__name__,
                tracer=Functions(torch_device(here)),
                optimistic=optimistic,
                # In the virtual world, actors may be wherever the user has put them.
                host_only=here.device is None and not here.is_virtual,
            )

    @property
    def _driver(self) -> int | None:
        """The rank that may start executions, if there is one."""
        inputs = self._inputs
        return inputs.rank if inputs is not None and inputs.is_single else None


class Lowered:
    """One trace of a step, or several for as many signatures.

    Attributes:
        traces: the traced modules, and what it takes to run them.
    """

    def __init__(
        self,
        step: Step,
        traces: Sequence[Trace],
        world: World,
        again: Callable[[], Trace] | None = None,
    ) -> None:
        self.traces = tuple(traces)
        self._step = step
        self._world = world
        self._trace_optimistically = again
        self._fusing = [Fusing(trace.bodies) for trace in traces]

    @property
    def trace(self) -> Trace:
        """The first of the traces."""
        return self.traces[0]

    def as_text(self, phase: str = "traced", *, locations: bool = False, variant: int = 0) -> str:
        """The IR at a phase, compiled with the defaults as far as that phase.

        Args:
            phase: `traced`, `placed`, `async` or `scheduled`.
            locations: whether to print where in the source each op came from.
            variant: which of the signatures.

        Raises:
            ValueError: there is no such phase.
        """
        phases = [each.value for each in Phase]
        if phase not in phases:
            raise ValueError(f"as_text({phase!r}): the phases are {', '.join(phases)}")
        module = self._module_at(Phase(phase), self.traces[variant])
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
        check_inputs: bool | int | None = None,
    ) -> Compiled:
        """Make every rank's schedule, prove it, and bind it; collective.

        Args:
            schedule: how each rank orders its stages and microbatches; 1F1B if None.
            passes: optimisations to switch off by name, `-overlap,-cse`, or on again by `+name`
                after CG_PASSES has switched them off.
            dump: a directory to write the IR after every pass to; that of CG_DUMP if None.
            seed: of the random numbers that the step draws; CG_SEED if None.
            timeout: seconds that a call on all ranks may take; CG_TIMEOUT if None. Also those that
                `execute` waits while `max_inflight` executions are in flight; if None, CG_TIMEOUT
                where that is set, and else no limit. An execution itself has no other limit than
                that of `result(timeout)`, but for executions that do not move, `close` waits no
                longer than this.
            max_inflight: of a step with `inputs=cg.on(rank)`: how many of its executions may be in
                flight; each has registers and channels of its own on all ranks.
            fuse: `inductor` has TorchInductor compile the graphs of traced methods and of their
                backwards to fused kernels, on all ranks. Values are then equal up to rounding.
                `compiled.fused` says what is compiled.
            check_inputs: of a step whose `inputs` are several ranks: when to compare what they
                give, by a digest of each argument, before the execution runs. None: in the first
                three executions, in each whose number is a power of two, and in every 512th; True:
                in each; an int: in every so manieth; False: in none.

            All but `dump` and `timeout` must be equal on all ranks.

        Raises:
            FuseError: the compiler, or what it needs, is not there.
            IRError: the step cannot be compiled; the message shows the IR and the source line.
            PlanMismatch: the ranks have compiled different plans.
            TraceError: a parameter of a step with `inputs=cg.on(rank)` has the name of a keyword of
                `execute`.
            TypeError: `max_inflight`, `seed` or `check_inputs` is no integer, `timeout` no number,
                or `passes` no string.
            ValueError: `max_inflight` or `check_inputs` is less than 1, `timeout` is not above 0,
                or there is no such `fuse`.
        """
        if not isinstance(max_inflight, int) or isinstance(max_inflight, bool):
            raise TypeError(
                f"max_inflight={max_inflight!r}: it is the number of executions of "
                f"{self._step.__name__} that may be in flight, an int of at least 1"
            )
        with turn_of(self._world).taken(self._step.__name__):
            return self._compile(
                Numbering(),
                schedule=schedule,
                passes=passes,
                dump=dump,
                seed=seed,
                timeout=timeout,
                max_inflight=max_inflight,
                fuse=fuse,
                check_inputs=check_inputs,
            )

    def compile_optimistic(
        self,
        *,
        schedule: Schedule | None = None,
        passes: str = "",
        seed: int | None = None,
        timeout: float | None = None,
        check_inputs: bool | int | None = None,
    ) -> Optimistic:
        """As `compile`, for a step that clips gradients and goes on; collective.

        The result is called as that of `compile` and gives the same bits. Calls of
        `cg.clip_grad_norm` hold nothing up in it: see `Optimistic`. It pays where a step goes on
        after them, with the microbatches of the next update, and gradients are seldom clipped. It
        traces the step once more, and keeps a copy of all that the actors hold.

        Args:
            schedule, passes, seed, timeout, check_inputs: as in `compile`.

        Raises:
            TraceError, IRError, PlanMismatch: as in `lower` and `compile`.
            ValueError: the step was lowered for several signatures.
        """
        if self._trace_optimistically is None:
            raise ValueError("compile_optimistic() is for a step that lower() has traced")
        with turn_of(self._world).taken(self._step.__name__):
            bold = Lowered(self._step, [self._trace_optimistically()], self._world)
            numbering = Numbering()
            plain, bold_program = (
                lowered._compile(
                    numbering,
                    schedule=schedule,
                    passes=passes,
                    seed=seed,
                    timeout=timeout,
                    check_inputs=check_inputs,
                )
                for lowered in (self, bold)
            )
            return Optimistic(plain, bold_program, self._world, numbering)

    def _compile(
        self,
        numbering: Numbering,
        *,
        schedule: Schedule | None = None,
        passes: str = "",
        dump: Path | str | None = None,
        seed: int | None = None,
        timeout: float | None = None,
        max_inflight: int | None = None,
        fuse: str | None = None,
        check_inputs: bool | int | None = None,
    ) -> Compiled:
        check_options(passes, seed, timeout)
        every = interval(check_inputs)
        if fuse is not None:
            check_name(fuse)
        for trace in self.traces:
            check_transports(trace.module.program)
        settings = config()
        check_late_settings(settings)
        switches = parse_switches(settings.passes).then(parse_switches(passes))
        is_driven = max_inflight is not None and self._step._driver is not None
        if is_driven:
            for trace in self.traces:
                check_keywords(self._step.__wrapped__, trace.inputs, Compiled.execute)
        chosen_seed = int(settings.seed if seed is None else seed)
        options = {
            "schedule": schedule,
            "passes": ",".join(filter(None, (settings.passes, passes))),
            "seed": chosen_seed,
            "max_inflight": max_inflight,
            "fuse": fuse,
            "check_inputs": every,
        }
        check_compilation(self._world, self._step.__name__, self.traces, options)
        fabrics = fabrics_of(self._world)
        pipeline_of = functools.partial(
            default_pipeline,
            switches=switches,
            fabrics=fabrics,
            is_driven=is_driven,
            fuse=fuse,
        )
        variants = []
        for trace, fusing in zip(self.traces, self._fusing, strict=True):
            folder = None if dump is None else Path(dump)
            dumped = make_dump(settings, folder, self._step.__name__, self._world)
            sink = dumped if dumped is not None and dumped.is_wanted else None
            module, reports = run_passes(schedule, trace.module, pipeline_of, sink)
            if sink is not None:
                sink.finish(module, reports)
                if fabrics is not None:
                    whole = not is_driven or is_sealed(module)
                    sink.add("graphs.txt", describe(module, fabrics, whole))
            fallbacks = _fallbacks(module, self._world, dumped)
            if fuse is None:
                fused = fusing.plain(module, self._world)
            else:
                fused = fusing.apply(module, self._world)
                if sink is not None:
                    sink.add("fused.txt", fused.describe())
            loc = definition(self._step.__wrapped__)
            variants.append(Variant(trace, module, reports, fused, fallbacks, loc))
        return Compiled(
            variants,
            self._world,
            seed=chosen_seed,
            timeout=settings.timeout if timeout is None else timeout,
            patience=settings.given_timeout if timeout is None else timeout,
            driver=None if max_inflight is None else self._step._driver,
            max_inflight=max_inflight or 0,
            numbering=numbering,
            every=every,
        )

    def _module_at(self, phase: Phase, trace: Trace) -> Module:
        module = clone(trace.module)
        if module.phase is phase:
            return module
        pipeline = default_pipeline()
        reached = [index for index, p in enumerate(pipeline) if p.ensures is phase]
        PassManager(pipeline[: reached[0] + 1]).run(module)
        return module


def _fallbacks(module: Module, world: World, dumped: Dump | None) -> Fallbacks:
    """Hears of this rank's graphs that are not replayed; whoever dumps is told on all ranks."""
    if dumped is None:
        return Fallbacks(module, world.rank)
    if not dumped.is_wanted:
        dumped.remove("graphs.txt")
    return Fallbacks(module, world.rank, functools.partial(dumped.append, "graphs.txt"))
