"""The functions that users call: to place actors, trace steps, measure them, and gather values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from ...backends.agreement.gather import gather
from ...ir.pipeline.costs import Costs
from ...ir.types import Place
from ...tracer.actors.factory import ActorFactory
from ..world.devices import torch_device
from ..world.world import world
from .compiled import Compiled
from .step_function import Step

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
        compiled: the step, on its ranks as they are now. If its schedule does not split backwards,
            `tb` is the time of a whole backward.
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
        fn: the function. Its meaning is that of running it eagerly, all actors in one process.
        inputs: the ranks whose arguments count; all, which then must be equal, if None.
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


def _check_place(what: str, place: object) -> None:
    if place is None or isinstance(place, Place):
        return
    ranks = place if isinstance(place, (list, tuple)) else [place]
    written = ", ".join(map(str, ranks)) if all(type(rank) is int for rank in ranks) else "0"
    raise TypeError(
        f"cg.trace({what}={place!r}): {what} names ranks by cg.on, as in "
        f"@cg.trace({what}=cg.on({written}))"
    )
