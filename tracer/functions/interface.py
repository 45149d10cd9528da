"""Interface of the two halves of the tracer: steps, and the functions that they call.

The step tracer (`step.py`) records calls; the function tracer (`functions.py`) turns what is
called into declarations and bodies. A target says what is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, Protocol, TypeVar

from ...ir.location import Location
from ...ir.module import Function, Vjp
from ..actors.holdings import Shared, Use
from ..step.specs import Tree

T = TypeVar("T")

Body = Callable[..., Sequence[Any]]
"""Takes a function's inputs, returns all its outputs in a sequence."""

Guard = Callable[[], str | None]
"""Checked before each execution: None, or how the actor has changed since it was traced."""


class Peers(Protocol):
    """The world as the tracer needs it: who plays which rank, and how all hear of something."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def plays(self, rank: int) -> bool: ...

    def broadcast(self, value: T | None, root: int) -> T: ...

    def allgather(self, value: T) -> list[T]: ...


@dataclass(frozen=True)
class MethodTarget:
    """A method of an actor that lives in this process.

    `remat`: whether its derivative computes again what it needs of the forward. `function`: what
    is called with the instance, if not its own method of that name. `shared`: what the actor shares
    with other actors of its rank. `use`: notes what its functions do to its memory.
    """

    actor: str
    instance: Any
    method: str
    remat: bool = False
    function: Callable[..., Any] | None = None
    shared: tuple[Shared, ...] = ()
    use: Use | None = None

    @property
    def callable(self) -> Any:
        """The bound method; None if there is none."""
        if self.function is not None:
            return MethodType(self.function, self.instance)
        return getattr(self.instance, self.method, None)


@dataclass(frozen=True)
class TorchTarget:
    """A torch function of the step itself, such as `torch.add` or `Tensor.mean`."""

    callable: Callable[..., Any]
    name: str


Target = MethodTarget | TorchTarget


@dataclass(frozen=True)
class Write:
    """A call that may have changed its actor's state between a forward and its backward.

    `function` is the name that its function was traced by.
    """

    function: str
    loc: Location | None


@dataclass(frozen=True)
class TracedFunction:
    """A traced function: what every rank knows of it, and what the tracing process can run.

    Attributes:
        declaration: its entry in the module.
        results: the pytree that a call returns; its value leaves are the declaration's outputs.
        state_outputs: indices of the outputs that eager Python would return as live references
            to the actor's parameters or buffers.
        body: what to run (not sent to other ranks).
        guard: what the trace relied on (not sent to other ranks).
        strict: of an opaque function, a body that raises where a result requires a gradient, for
            calls that a loss depends on (not sent to other ranks).
        views: pairs (output, input) that share memory in plain Python. Of those that are no
            aliases in the declaration, the body gives a copy.
    """

    declaration: Function
    results: Tree
    state_outputs: tuple[int, ...]
    body: Body
    guard: Guard | None
    strict: Body | None = None
    views: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class TracedHalf:
    """One of the halves of a backward, as `Vjp` defines them."""

    declaration: Function
    body: Body


@dataclass(frozen=True)
class TracedVjp:
    """The derivative of a traced function for one choice of outputs and inputs.

    `forward` and `backward` are the declarations that `vjp` names, `halves` those of its further
    functions; the bodies stay in the process that traced them.
    """

    vjp: Vjp
    forward: Function
    backward: Function
    forward_body: Body
    backward_body: Body
    halves: tuple[TracedHalf, ...] = ()


class FunctionTracer(Protocol):
    """Implemented by `functions.py`."""

    def trace(
        self, target: Target, signature: Tree, name: str, loc: Location | None
    ) -> TracedFunction:
        """Trace a call with the given arguments, a pytree `(args, kwargs)`.

        Raises:
            TraceError: the function cannot be traced; state of the actor is as before.
        """

    def trace_vjp(
        self,
        target: Target,
        signature: Tree,
        name: str,
        grad_outputs: tuple[int, ...],
        grad_inputs: tuple[int, ...],
        loc: Location | None,
        between: Sequence[Write] = (),
    ) -> TracedVjp:
        """Trace forward and backward of the same call as one joint graph, and split it.

        `grad_outputs` indexes the value leaves of the results, `grad_inputs` those of the
        signature. `between` are the writes to the actor that come after the forward and before
        the backward, each function once.

        Raises:
            TraceError: as in `trace`, or the backward would draw random numbers again, or it
                would read state that a call in between has written to.
        """
