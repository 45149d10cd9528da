"""A step, and its cache: when a call is traced and compiled anew."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

from ...ir.types import Place
from ...tracer.function.functions import Functions
from ...tracer.function.step_pieces import StepPieces
from ...tracer.graph.autodiff.saved_tensors import SavingLimits
from ...tracer.method.alike import Traces
from ...tracer.record.actor_names import ActorNames
from ...tracer.record.session.inputs import InputError
from ...tracer.record.session.signature import (
    CallSignature,
    by_position,
    own_parameters,
    signature_of,
)
from ...tracer.record.step import trace_step
from ...tracer.record.trace import Trace
from ...tracer.torch_modes import Ambient
from ..cache.trace_entries import new_traces
from ..environment.config import config
from ..runtime.agreement import TraceRequest
from ..runtime.driven_graphs import check_outside
from ..runtime.numbering import Definition, Numbering, check_state
from ..runtime.step_lock import lock_of
from ..world.devices import torch_device
from ..world.world import world
from .compile_options import CompileOptions
from .compiled import Compiled
from .fit_trace import Again
from .lowered import Lowered

_LOG = logging.getLogger("cg")


class Step:
    """A function over actors, compiled for each signature that it is called with.

    Calling it is collective: every rank calls it, with arguments of the same types. It is compiled
    anew when a name by which the function reaches actors is given to other actors; `compilations`
    says why it was, each time. An argument may be given by position or by name, which makes no
    difference, unless a decorator below `cg.trace` takes the arguments.
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
        self._signatures: list[CallSignature] = []
        self._compilations: list[str] = []
        self._cause = "first call"
        self._actors: ActorNames | None = None
        self._numbering = Numbering()
        self._numberings: WeakSet[Numbering] = WeakSet()

    def __repr__(self) -> str:
        count = len(self._compiled)
        state = f"compiled for {count} signature{'s' * (count != 1)}" if count else "not compiled"
        return f"<cg.Step {self.__name__}: {state}>"

    def __get__(self, instance: object, owner: type | None = None) -> Step:
        """The step of one object, if a method is decorated; made on the first access."""
        if instance is None:
            return self
        steps: dict[str, Any] = vars(instance)
        bound = steps.get(self.__name__)
        if not isinstance(bound, Step):
            method = self.__wrapped__.__get__(instance, owner)
            bound = steps[self.__name__] = Step(method, self._inputs, self._outputs)
        return bound

    @property
    def compilations(self) -> tuple[str, ...]:
        """Why calls of the step have compiled it, in order: one text for each time.

        The first is `first call`. Any other says how the signature differs from the nearest one
        that was compiled before, such as `x was float32[8,8], is float32[4,8]`, or why what was
        compiled before was dropped. It also goes to the logger `cg`, at the level INFO. What
        `lower(...).compile()` has compiled is not among them.
        """
        return tuple(self._compilations)

    @functools.cached_property
    def _parameters(self) -> inspect.Signature | None:
        return own_parameters(self.__wrapped__)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the step; the first call with a signature traces and compiles it.

        Returns:
            The result of the function; None on ranks that get no outputs.

        Raises:
            TraceError: the function, or a method that it calls, cannot be traced.
            IRError: the trace cannot be compiled.
            InputError: the step cannot take the arguments, or ranks are found to give others.
            PlanMismatch: ranks call different steps, or this one with arguments of other types.
            RemoteError: a method raised, on any rank; every rank raises it.
        """
        if kwargs and self._parameters is not None:
            args, kwargs = by_position(self._parameters, args, kwargs)
        try:
            key = signature_of(args, kwargs)
        except InputError:
            self.lower(*args, **kwargs)  # which tells the other ranks
            raise
        if self._actors is not None and (name := self._actors.moved()) is not None:
            self._forget(f"the name '{name}' holds other actors")
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compile_for(key, args, kwargs)
        return compiled(*args, **kwargs)

    def _compile_for(
        self, key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Compiled:
        """Compile the step for a signature, unless another thread has meanwhile."""
        with lock_of(world()).held(self.__name__):
            compiled = self._compiled.get(key)
            if compiled is None:
                if self._actors is None:
                    self._actors = ActorNames(self.__wrapped__)
                lowered = self.lower(*args, **kwargs)
                signature = CallSignature(lowered.trace.inputs, Ambient.now())
                cause = signature.why_new(self._signatures) if self._signatures else self._cause
                if self._compilations:
                    _LOG.info("step %s is compiled again: %s", self.__name__, cause)
                compiled = lowered._compile(CompileOptions(), self._numbering)
                self._compiled[key] = compiled
                self._signatures.append(signature)
                self._compilations.append(cause)
        return compiled

    def state_dict(self) -> dict[str, int]:
        """The state that random numbers of the step's calls depend on, as `Compiled.state_dict`.

        It counts the calls with all signatures, also those before `clear_cache`, and nothing of
        what `lower(...).compile()` has returned, which has a state of its own.

        Raises:
            RuntimeError: only the result of `lower(...).compile()` was called, never the step.
        """
        compiled_calls = max((numbering.next for numbering in self._numberings), default=0)
        if compiled_calls and not self._numbering.next:
            raise RuntimeError(
                f"step {self.__name__} was never called itself, but what lower(...).compile() has "
                f"returned was, {compiled_calls} times, and counts for itself: save the "
                "state_dict() of that, or a resumed run would draw the same random numbers once "
                "more"
            )
        return {"seed": config().seed, "calls": self._numbering.next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, before or after the first call; see `Compiled.load_state_dict`."""
        check_state(world(), self.__name__, state, config().seed, ("calls",))
        self._numbering.next = state["calls"]

    def clear_cache(self) -> None:
        """Forget the programs of earlier calls, so that the next call traces again; on all ranks.

        Needed when an actor has changed in a way that the trace relied on, such as by `eval()`.
        The results of `lower(...).compile()` are not affected.
        """
        self._forget("clear_cache() was called")

    def _forget(self, cause: str) -> None:
        """Drop what was compiled."""
        if self._compiled:
            self._cause = cause
        for compiled in self._compiled.values():
            compiled.close()
        self._compiled.clear()
        self._signatures.clear()
        self._actors = None

    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered:
        """Trace the step for arguments like these; collective.

        Args:
            args, kwargs: tensors (only dtype, shape and `requires_grad` count), `cg.object` for
                Python objects, and Python constants.

        Raises:
            InputError: the step does not take these arguments.
            TraceError: the function, or a method that it calls, cannot be traced.
        """
        trace = functools.partial(self._trace, args, kwargs, new_traces())
        return Lowered(self._definition, [trace()], world(), [Again(trace)], (args, kwargs))

    def lower_many(self, signatures: Sequence[Any]) -> Lowered:
        """Trace the step for each of several sets of arguments; collective.

        Compiled, they are one graph: each call takes the variant that fits its arguments. Calls of
        methods that are alike in several of them are traced once.

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
        traces = new_traces()
        again = [
            Again(functools.partial(self._trace_entry, index, entry, traces))
            for index, entry in enumerate(signatures)
        ]
        return Lowered(self._definition, [retrace.trace() for retrace in again], world(), again)

    def _trace_entry(self, index: int, entry: Any, traces: Traces, **options: Any) -> Trace:
        """The trace for one of the sets of arguments that `lower_many` takes."""
        args, kwargs = entry if isinstance(entry, tuple) else (entry,), {}
        if isinstance(entry, dict):
            args, kwargs = (), entry
        try:
            return self._trace(args, kwargs, traces, **options)
        except InputError as error:
            raise InputError(f"entry {index} of lower_many(): {error}") from None

    def _trace(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        traces: Traces,
        optimistic: bool = False,
        remat: frozenset[str] = frozenset(),
        fused: bool = False,
        limits: SavingLimits | None = None,
        pieces: StepPieces | None = None,
    ) -> Trace:
        """Trace the step; it takes less time with `traces` and `pieces` of an earlier trace."""
        current_world = world()
        check_outside(current_world, self.__name__)
        request = TraceRequest(
            self.__name__,
            self.__wrapped__,
            self._inputs,
            self._outputs,
            optimistic,
            remat,
            fused,
            None if limits is None else limits.limits,
        )
        with lock_of(current_world).held(self.__name__, tracing=True):
            request.check(current_world, args, kwargs)
            trace = trace_step(
                self.__wrapped__,
                args,
                kwargs,
                peers=current_world,
                inputs=self._inputs,
                outputs=self._outputs,
                name=self.__name__,
                tracer=Functions(torch_device(current_world), traces, fused, limits, pieces),
                optimistic=optimistic,
                remat=remat,
                # In the virtual world, actors may be wherever the user has put them.
                host_only=current_world.device is None and not current_world.is_virtual,
            )
        for line in trace.float8:
            _LOG.info("step %s: %s", self.__name__, line)
        return trace

    @property
    def _definition(self) -> Definition:
        inputs = self._inputs
        driver = inputs.rank if inputs is not None and inputs.is_single else None
        return Definition(self.__name__, self.__wrapped__, driver, self._numberings)
