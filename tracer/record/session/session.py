"""The state of a trace in progress, and how code inside the step finds it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from ....ir.location import Location
from ....ir.ops import Call, Op, Value
from ....ir.ops.module import Module, Program
from ....ir.ops.names import Names
from ....ir.phases import Phase
from ....ir.pipeline.tradeoff import Tradeoff
from ....ir.text.printer import format_op
from ....ir.types import ObjectType, Place, Type
from ...errors import TraceError, different
from ...source import caller_location, is_user_file
from ...torch_modes import Ambient
from ...values.gradient_buckets import GradientLayout
from ...values.group import GroupActor
from ...values.interface import Bodies, Callee, FunctionTracer, Guard, Peers, Write
from ...values.sharing import Sharing
from ...values.specs import ObjectSpec, TensorSpec, Tree
from ...values.values import (
    IN_A_METHOD,
    ObjectValue,
    StaleValue,
    Storage,
    Traced,
    TracedTensor,
    escaped,
    is_consistent,
    make_tensor,
)
from .tape import Tape

O = TypeVar("O", bound=Op)  # noqa: E741 - the type of op that is being recorded


@dataclass(eq=False)
class Session:
    """A trace of a step in progress.

    Attributes:
        peers: the world that the step will run in.
        tracer: traces the functions that the step calls.
        module: the module, as recorded so far.
        bodies, constants: as in `Trace`.
        guards: the guards of the functions that can run in this process, by function name.
        tape: the ops through which gradients flow.
        mb: the current microbatch; None outside of a loop over microbatches.
        recorder: the mode that records torch functions; None when it is not entered.
        paused: the reason why nothing is recorded at the moment; None if ops are recorded.
        writes: the changes of each actor's state, by actor name: paths, or None for any.
        written: the calls that write to each actor's state, with their indices in the program.
        callees: the functions traced so far, by callable and signature.
        sharing: the state that actors share; None before the first call of an actor.
        ambient: torch's modes, under which all of the step is traced.
        first: the session of the first run, if this is a later run of the same step.
        optimistic: whether to assume that no gradients have to be clipped.
        remat: the names of the actors whose methods are called as by `cg.remat`.
        assumptions: scalars of an optimistic step that are true if the assumption holds.
        results: the pytree of specs of the step's results; set at the end of the trace.
        groups: the actors on meshes that the step has called, by name.
        gradients: the gradients that each derivative adds to an actor on a mesh, by path.
        hooked, tradeoffs: of derivatives, by name, as in `TracedVjp`.
        unreduced: the gradients of each actor that backwards have added since its last reduction.
        reduced: the gradients of each actor that have been reduced.
        reductions: the names of the functions that reduce gradients, by kind and gradients.
        function_names, constant_names, value_names: the names in use.
    """

    peers: Peers
    tracer: FunctionTracer
    module: Module
    bodies: dict[str, Bodies] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    guards: dict[str, Guard] = field(default_factory=dict)
    tape: Tape = field(default_factory=Tape)
    mb: int | None = None
    recorder: TorchFunctionMode | None = None
    paused: str | None = None
    writes: dict[str, list[frozenset[str] | None]] = field(default_factory=dict)
    written: dict[str, list[tuple[int, Write]]] = field(default_factory=dict)
    callees: dict[Any, Callee] = field(default_factory=dict)
    sharing: Sharing | None = None
    ambient: Ambient = field(default_factory=Ambient.now)
    first: Session | None = None
    optimistic: bool = False
    remat: frozenset[str] = frozenset()
    assumptions: list[TracedTensor] = field(default_factory=list)
    results: Tree = field(init=False)
    groups: dict[str, GroupActor] = field(default_factory=dict)
    gradients: dict[str, Mapping[str, GradientLayout]] = field(default_factory=dict)
    hooked: dict[str, tuple[str, ...]] = field(default_factory=dict)
    tradeoffs: dict[str, Tradeoff] = field(default_factory=dict)
    unreduced: dict[str, dict[str, GradientLayout]] = field(default_factory=dict)
    reduced: dict[str, dict[str, GradientLayout]] = field(default_factory=dict)
    reductions: dict[Hashable, str] = field(default_factory=dict)
    function_names: Names = field(default_factory=Names)
    constant_names: Names = field(default_factory=Names)
    value_names: Names = field(default_factory=Names)
    _values: int = 0
    _keys: int = 0

    @staticmethod
    def start(name: str, peers: Peers, tracer: FunctionTracer) -> Session:
        """An empty session."""
        module = Module(name, Phase.TRACED, peers.size, programs=[Program(name)])
        return Session(peers, tracer, module)

    def again(self) -> Session:
        """A session that traces the same step again, with the functions of this session."""
        first_module = self.module
        module = Module(
            first_module.name,
            Phase.TRACED,
            first_module.world,
            programs=[Program(first_module.name)],
        )
        module.functions, module.vjps = first_module.functions, first_module.vjps
        module.meshes, module.bodies = first_module.meshes, first_module.bodies
        return Session(
            self.peers,
            self.tracer,
            module,
            bodies=self.bodies,
            callees=self.callees,
            gradients=self.gradients,
            hooked=self.hooked,
            tradeoffs=self.tradeoffs,
            reductions=self.reductions,
            sharing=self.sharing,
            optimistic=self.optimistic,
            remat=self.remat,
            ambient=self.ambient,
            first=self,
        )

    def refuse_new(self, shown: str, loc: Location | None) -> None:
        """Return if new functions may be traced, that is, in the first run of a step.

        Raises:
            TraceError: this is a later run, which makes a call of `shown` that the first did not.
        """
        if self.first is None:
            return
        before = self.first.module.program.ops
        index = self.last + 1
        first_op = before[index] if index < len(before) else None
        was = (
            f"where it was {format_op(first_op)} at first" if first_op is not None else "at its end"
        )
        raise different(self.module.name, f"it comes to another call of {shown}, {was}", loc)

    @property
    def everywhere(self) -> Place:
        """The place of all ranks."""
        return self.module.everywhere

    @contextmanager
    def pause(self, why: str) -> Iterator[None]:
        """Let torch functions run as usual inside the `with` block, and refuse to record.

        The recorder's mode is exited as well, if it is the innermost one. Otherwise torch would
        call it for all torch functions that tracing a method takes, two thirds of all its calls.
        """
        before, self.paused = self.paused, why
        recorder = self.recorder if _innermost_mode() is self.recorder else None
        if recorder is not None:
            recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            if recorder is not None:
                recorder.__enter__()  # type: ignore[no-untyped-call]
            self.paused = before

    def emit(self, op: O) -> O:
        """Append an op to the program."""
        self.module.program.ops.append(op)
        return op

    @property
    def last(self) -> int:
        """The index of the op that was appended last."""
        return len(self.module.program.ops) - 1

    def next_key(self) -> int:
        """The key of the next call that draws random numbers."""
        self._keys += 1
        return self._keys - 1

    def new_value(self, base: str, type_: Type) -> Value:
        """A value with a name that is not in use."""
        return Value(self.value_names.fresh(base), type_)

    def hold(self, value: Value, spec: TensorSpec | ObjectSpec) -> TracedTensor | ObjectValue:
        """Make the traced tensor or object that the step's Python holds for a value."""
        self._values += 1
        traced = Traced(self, value, spec, self._values)
        if type(spec) is TensorSpec:
            return make_tensor(traced, spec)
        return ObjectValue(traced)

    def remedy_for_parts(self, value: Value) -> str:
        """The remedy for a step that takes a part of an object."""
        program = self.module.program
        if value in program.params:
            return (
                'lower the step with the parts, as in lower({"key": cg.object}), or any other '
                f"pytree; or {IN_A_METHOD}"
            )
        maker = next((op for op in program.ops if value in op.results), None)
        if isinstance(maker, Call) and len(maker.results) == 1:
            method = self.module.functions[maker.fn.name]
            if method.loc is not None and is_user_file(method.loc.file):
                return (
                    "if the method returns a tuple, say of how many by @cg.opaque(returns=2), and "
                    f"unpack that; or {IN_A_METHOD}"
                )
        return IN_A_METHOD

    def remedy_for_tensors(self, value: Value) -> str:
        """The remedy for an object in place of a tensor; it names the first call that made one."""
        makers = {result: op for op in self.module.program.ops for result in op.results}
        maker = makers.get(value)
        object_value: Value | None = value
        while object_value is not None and isinstance(call := makers.get(object_value), Call):
            maker = call
            object_value = next((v for v in maker.operands if isinstance(v.type, ObjectType)), None)
        if not isinstance(maker, Call):
            return IN_A_METHOD
        return (
            f"@{maker.fn.name} returns an object, since it is called as it is: a method does that "
            "if it uses an optimizer, a GradScaler or .grad, is given an object, or is marked "
            "@cg.opaque, and no gradient flows through it. Take what does so out of the method, "
            "and multiply the loss by a number instead of scaler.scale(loss); or, without a "
            "gradient, mark it @cg.opaque(fake=...)"
        )

    def rebind(self, tensor: TracedTensor, value: Value, spec: TensorSpec) -> None:
        """Let a tensor that was written to stand for its new value."""
        self._values += 1
        traced = tensor.traced
        traced.value, traced.spec, traced.order = value, spec, self._values

    def use(self, value: TracedTensor | ObjectValue) -> Traced:
        """Check a value that the step is about to use, and return its `Traced`.

        Torch functions must not be intercepted meanwhile.

        Raises:
            TraceError: the value belongs to another trace, comes out of an autograd function, or
                is state of an actor that has changed since.
        """
        traced = value.traced
        if traced.trace is not self:
            if traced.trace is self.first:
                raise StaleValue(
                    f"the step uses %{traced.value.name}, a value of an earlier trace of it, "
                    "which something has kept",
                    loc=caller_location(),
                    remedy="make it in the step each time, or keep it in an actor: what a step "
                    "stores outside of itself while it is traced is no tensor",
                )
            raise escaped("this step uses")
        if type(value) is TracedTensor and not is_consistent(value):
            raise TraceError(
                f"%{traced.value.name} came out of a torch.autograd.Function, whose gradient the "
                "trace of the step does not see",
                loc=caller_location(),
                remedy="apply the autograd function in an actor's method",
            )
        if traced.storage is not None and traced.storage.actor is not None:
            self._check_fresh(traced, traced.storage)
        return traced

    def use_tensor(self, value: object, shown: str, loc: Location | None, remedy: str) -> Traced:
        """As `use`, for a value that has to be a tensor of the step.

        Args:
            value: the value.
            shown: the name of the function that takes the value, for messages.
            loc: the user's line.
            remedy: the remedy in the error if the value is something else.

        Raises:
            TraceError: the value is not a tensor of the step; or as in `use`.
        """
        if not isinstance(value, TracedTensor):
            raise TraceError(
                f"{shown} of a {type(value).__name__}, which is not a tensor of the step",
                loc=loc,
                remedy=remedy,
            )
        with torch._C.DisableTorchFunction():
            return self.use(value)

    def _check_fresh(self, traced: Traced, storage: Storage) -> None:
        actor = storage.actor
        since = self.writes.get(actor, ())[storage.writes :] if actor is not None else ()
        if any(changes is None or changes & storage.state for changes in since):
            raise TraceError(
                f"%{traced.value.name} is state of {actor} itself, and {actor} has been written to "
                "since: plain Python would see the new state here, the compiled step the old",
                loc=caller_location(),
                remedy="return a .clone() of the state from the method, or read it again",
            )


_CURRENT: ContextVar[Session | None] = ContextVar("cg_session", default=None)


def _innermost_mode() -> object:
    """The innermost torch function mode, which torch calls first; None if there is none."""
    count = torch._C._len_torch_function_stack()
    return torch._C._get_function_stack_at(count - 1) if count else None


current: Callable[[], Session | None] = _CURRENT.get
"""The trace in progress; None if no step is being traced."""


def recording(shown: str) -> Session | None:
    """The trace in progress, ready to record; None outside of a step.

    Raises:
        TraceError: `shown` was called in a function that is being traced, and not in the step.
    """
    session = _CURRENT.get()
    if session is not None and session.paused is not None:
        raise TraceError(
            f"{shown} inside {session.paused}",
            loc=caller_location(),
            remedy="do this in the step, between calls of actors' methods",
        )
    return session


@contextmanager
def entered(session: Session) -> Iterator[None]:
    """Make `session` the trace in progress inside the `with` block."""
    token = _CURRENT.set(session)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def placed(values: Sequence[Traced], everywhere: Place) -> Place:
    """The place at which a torch operation of the step runs, which follows from its operands.

    If operands are on single ranks, it runs on the rank of the one that was made last. If all
    operands are replicated, it runs on the ranks that they share; if they share none, at the place
    of the operand that was made last.
    """
    places = [(traced.order, traced.place) for traced in values]
    single = [ordered_place for ordered_place in places if ordered_place[1].is_single]
    if single:
        return max(single, key=itemgetter(0))[1]
    ranks = everywhere.ranks
    for _, place in places:
        ranks = tuple(rank for rank in place.ranks if rank in ranks)
    if not ranks:
        return max(places, key=itemgetter(0))[1]
    return everywhere if ranks == everywhere.ranks else Place(ranks)
