"""The functions that users call: to place actors, trace steps, measure them, and gather values."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, overload

from ...backends.agreement.gather import gather
from ...ir.pipeline.costs import Costs
from ...ir.text.plan_file import PlanFileError
from ...ir.types import Place
from ...passes.simulate.residency import AUTO, KEEPS, Residency
from ...tracer.record.actors.factory import ActorFactory
from ...tracer.source import caller_location
from ..runtime.plans_on_disk import check_same_step, read_plan
from ..runtime.step_lock import lock_of
from ..world.devices import pinned_memory, torch_device
from ..world.world import world
from .compile_options import CompileOptions
from .compiled import Compiled
from .compiled_programs import PlanFacts
from .lowered import Lowered
from .step_function import Step

T = TypeVar("T")

actor = ActorFactory(
    world, lambda: torch_device(world()), lambda size: pinned_memory(world(), size)
)
"""Class decorator: lets instances live on one rank each; see `ActorFactory`."""


def on(*ranks: int) -> Place:
    """The place of the given ranks, for `inputs=` and `outputs=` of `cg.trace`.

    Args:
        ranks: numbers of processes, from 0.

    Raises:
        TypeError: a rank is no integer.
        ValueError: no rank is given, or one is negative or given twice.
    """
    call = f"cg.on({', '.join(map(repr, ranks))})"
    if not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in ranks):
        raise TypeError(f"{call}: ranks are integers, as in cg.on(0) or cg.on(0, 1)")
    if any(rank < 0 for rank in ranks):
        raise ValueError(f"{call}: ranks count from 0")
    return Place(ranks)


def fsdp(
    *,
    bucket: str = "",
    keep: str = AUTO,
    memory: float | None = None,
    prefetch: int = 1,
    separate: bool = True,
) -> Residency:
    """Say for how long stored parameters stay gathered, for `compile(fsdp=...)`.

    A stored parameter is one that an actor on a mesh cuts further while it rests, by `store=`. The
    parameters of a bucket are gathered together, and their gradients reduced together, except that
    a rank's piece of a mebibyte or more travels by itself.

    Args:
        bucket: the parameters that are gathered together: modules or parameters by their paths,
            name by name, with `*` and `?` as in file names, as in `blocks.*` or
            `encoder.*|decoder.*`; those that match nothing are one bucket more. By default modules
            that have a number in their path, as elements of `nn.ModuleList` have, are one each.
        keep: `task`: gathered for each forward of a microbatch, and again for its backward;
            gradients are reduced in each backward. `step`: gathered once, until the last backward;
            gradients are added up over all microbatches, and reduced once. `auto`: as `step` for as
            many buckets as `memory` allows.
        memory: bytes that the program of each rank may hold at its peak, as `memory_analysis()`
            counts them: without what actors keep. None: any number.
        prefetch: how far ahead of its use a bucket is gathered, in calls of parts of methods. Each
            costs the memory of a bucket.
        separate: whether gathers and reductions have communicators, and on devices streams, of
            their own, so that they overlap with each other and with other collectives.

    Raises:
        TypeError: an argument is of another type.
        ValueError: there is no such `keep`, or a number is out of range.
    """
    if keep not in KEEPS:
        raise ValueError(f"cg.fsdp(keep={keep!r}): it is one of {', '.join(map(repr, KEEPS))}")
    if not isinstance(bucket, str):
        raise TypeError(f"cg.fsdp(bucket={bucket!r}): a string, as 'blocks.*'")
    if not isinstance(prefetch, int) or isinstance(prefetch, bool):
        raise TypeError(f"cg.fsdp(prefetch={prefetch!r}): a number of calls")
    if prefetch < 0:
        raise ValueError(f"cg.fsdp(prefetch={prefetch}): at least 0 calls")
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, int | float)):
        raise TypeError(f"cg.fsdp(memory={memory!r}): a number of bytes, as 60e9, or None")
    if memory is not None and not memory > 0:
        raise ValueError(f"cg.fsdp(memory={memory}): more than 0 bytes, or None for any number")
    bytes_ = None if memory is None or math.isinf(memory) else int(memory)
    return Residency(bucket, keep, bytes_, prefetch, bool(separate), caller_location())


def barrier() -> None:
    """Wait until every rank has come here.

    Raises:
        TimeoutError: some rank has not come by the deadline (CG_TIMEOUT).
    """
    world().barrier()


def allgather(value: T) -> list[T]:
    """Give every rank the (picklable) values of all, by rank.

    Args:
        value: an object that can be pickled; it should be small.

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
        compiled: the step, on its ranks as they are now. If its schedule does not split backwards,
            `tb` is the time of a whole backward.
        args, kwargs: as the step takes them.
        executions: how often the step runs, besides once to warm up; 5 times if None. Each run does
            all that a call does, such as an update of weights. If the step itself has
            a parameter of that name, write `compiled.repeated(5).measure(...)`.

    Returns:
        The same costs on all ranks; `Costs.save` writes them to a file.

    Raises:
        As calling the step does.
        TypeError: `executions` may be meant for the step.
        ValueError: it is less than 1.
    """
    return compiled.measure(*args, executions=executions, **kwargs)


def load_plan(
    lowered: Lowered,
    file: Path | str,
    *,
    seed: int | None = None,
    timeout: float | None = None,
    check_inputs: bool | int | None = None,
) -> Compiled:
    """Compile a step with the schedule of every rank from a file of `compiled.save`; collective.

    No pass runs, and no schedule is searched. Actors, weights and methods are those of this
    program: the plan names them.

    Args:
        lowered: the step, traced by this program.
        file: of the plan, of which each rank reads its own part. Nothing in it is executed.
        seed, timeout, check_inputs: as in `compile`.

    Raises:
        TypeError: `lowered` is no lowered step, or another argument is of another type.
        OSError: a rank could not read the file.
        PlanFileError: it is no plan, or one of another step, of other ranks or devices; the message
            says what differs. Or it was changed since its programs were proven, or is not the same
            on all ranks, or `lowered` has several signatures.
    """
    if not isinstance(lowered, Lowered):
        raise TypeError(
            f"cg.load_plan({lowered!r}, ...): give the step as it is lowered, step.lower(...)"
        )
    driven = lowered._step.driver is not None
    plan = read_plan(file, lowered._world, len(lowered.traces), driven)
    try:
        facts = PlanFacts(**plan.facts)
    except TypeError as error:
        raise PlanFileError(f"{file} has facts of another version of cg: save it again") from error
    options = CompileOptions(
        fuse=facts.fuse,
        max_inflight=facts.max_inflight,
        seed=seed,
        timeout=timeout,
        check_inputs=check_inputs,
        plan=plan,
    )
    with lock_of(lowered._world).held(lowered._step.name):
        retraced = lowered._for_fusing(options)._for_plan(facts)
        check_same_step(plan, retraced.trace.module, file)
        return retraced._compile(options, lowered._step.number())


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
        fn: the function. Its meaning is that of running it eagerly, all actors in one process.
        inputs: the ranks whose arguments count; None for all, whose arguments must then be equal.
        outputs: the ranks that get its result; all if None.

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


def _check_place(parameter: str, place: object) -> None:
    if place is None or isinstance(place, Place):
        return
    ranks = place if isinstance(place, (list, tuple)) else [place]
    example = ", ".join(map(str, ranks)) if all(type(rank) is int for rank in ranks) else "0"
    raise TypeError(
        f"cg.trace({parameter}={place!r}): {parameter} names ranks by cg.on, as in "
        f"@cg.trace({parameter}=cg.on({example}))"
    )
