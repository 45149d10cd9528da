"""Interface of the two halves of the tracer: steps, and the functions that they call.

The step tracer (`step.py`) records calls; the function tracer (`functions.py`) turns what is
called into declarations and bodies. A `Target` says what is called, a `TracedCall` how, and a
`Callee` what became of it in the module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, cast

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor

from ...ir.attributes import Symbol
from ...ir.location import Location
from ...ir.ops.module import Function, Program, Vjp
from ...ir.pipeline.tradeoff import Tradeoff
from ...ir.types import Place, Type, relocate
from ..errors import TraceError
from ..source import is_user_file
from .actor_state import ActorState
from .float8_layers import Float8Use
from .gradient_buckets import GradientLayout
from .group import Group
from .heap.kinds import SCALARS, is_plain, is_walked
from .holdings import Shared, Use
from .optimizer_state import RestingState
from .specs import Leaf, ObjectSpec, Static, TensorSpec, Tree, ir_dtype

T = TypeVar("T")

Body = Callable[..., Sequence[Any]]
"""Takes a function's inputs, returns all its outputs in a sequence."""


@dataclass(frozen=True)
class RankBodies:
    """The bodies of a function for the ranks that this process plays, where these differ."""

    of_rank: Mapping[int, Body]

    @staticmethod
    def of(bodies: Mapping[int, Body]) -> Bodies:
        """The bodies of some ranks; for one rank, its body."""
        return RankBodies(bodies) if len(bodies) > 1 else next(iter(bodies.values()))

    def at(self, rank: int) -> Body:
        """The body of a rank."""
        return self.of_rank[rank]


Bodies: TypeAlias = Body | RankBodies
"""The callables that run a function in this process."""

Guard = Callable[[], str | None]
"""Checked before each execution: None, or how the actor has changed since it was traced."""


class Peers(Protocol):
    """What the tracer needs of the world: who plays which rank, and how processes communicate."""

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

    Attributes:
        remat: whether its derivative computes again what it needs of the forward.
        function: the function to call with the instance; None: its own method of that name.
        shared: what the actor shares with other actors of its rank.
        use: notes what its functions do to its memory.
        group: the ranks that call it together; None where one rank calls it.
        float8: the actor's linear layers that compute in float8, if any.
        resting: state that rests on the host, by rank, if the method may use any.
    """

    actor: str
    instance: Any
    method: str
    remat: bool = False
    function: Callable[..., Any] | None = None
    shared: tuple[Shared, ...] = ()
    use: Use | None = None
    group: Group | None = None
    float8: Float8Use | None = None
    resting: Mapping[int, RestingState] = field(default_factory=dict)

    @property
    def callable(self) -> Any:
        """The bound method; None if there is none."""
        if self.function is not None:
            return MethodType(self.function, self.instance)
        return getattr(self.instance, self.method, None)

    @property
    def name(self) -> str:
        """The method in words, such as `Stage.forward`."""
        return f"{type(self.instance).__qualname__}.{self.method}"


@dataclass(frozen=True)
class TorchTarget:
    """A torch function of the step itself, such as `torch.add` or `Tensor.mean`."""

    callable: Callable[..., Any]
    name: str
    group: Group | None = None

    actor: ClassVar[None] = None
    remat: ClassVar[bool] = False
    shared: ClassVar[tuple[Shared, ...]] = ()
    use: ClassVar[None] = None
    float8: ClassVar[None] = None


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
        state_outputs: indices of outputs that plain Python returns as references to the state.
        refers, changes: the paths of these, and of the state that it changes; None: any of it.
        body: what to run (not sent to other ranks); None for a program.
        program, called: the body of a program, and the functions that it calls.
        guard: what the trace relied on (not sent to other ranks).
        strict: for an opaque function, a body that raises where a result requires a gradient, for
            calls that a loss depends on (not sent to other ranks).
        views: pairs (output, input) that share memory in plain Python. The body gives a copy where
            the declaration has no alias for the pair.
        reaching: for each output, the inputs that its gradient may go to.
        operators: writes down its operators on whole tensors, which ranks of a mesh compare (not
            sent to other ranks).
        host_state: bodies that hand over state on the host, by name (not sent to other ranks).
    """

    declaration: Function
    results: Tree
    state_outputs: tuple[int, ...]
    body: Bodies | None
    guard: Guard | None
    strict: Bodies | None = None
    views: tuple[tuple[int, int], ...] = ()
    program: Program | None = None
    called: tuple[TracedPart, ...] = ()
    reaching: tuple[tuple[int, ...], ...] = ()
    operators: Callable[[], str] = str
    host_state: Mapping[str, Bodies] = field(default_factory=dict)
    refers: frozenset[str] = frozenset()
    changes: frozenset[str] | None = None

    @property
    def parts(self) -> tuple[TracedPart, ...]:
        """The function, and those that it calls."""
        return (TracedPart(self.declaration, self.body, self.program), *self.called)


@dataclass(frozen=True)
class TracedPart:
    """A function of a derivative, or of a program: a half of a backward, say.

    If it is a program, `program` is its body, which calls the functions `called`, and `body` is
    None.
    """

    declaration: Function
    body: Bodies | None
    program: Program | None = None
    called: tuple[TracedPart, ...] = ()

    @property
    def only_body(self) -> Body:
        """The body, where there is one for all ranks."""
        assert self.body is not None
        assert not isinstance(self.body, RankBodies)
        return self.body


@dataclass(frozen=True)
class TracedVjp:
    """The derivative of a traced function for one choice of outputs and inputs.

    The bodies stay in the process that traced them.

    Attributes:
        vjp: names its functions.
        first, second: the forward and the backward.
        halves: the halves of the backward.
        gradients: for an actor on a mesh, what the backward adds to `.grad` of its tensors, by
            path.
        hooked: of the tensors to whose `.grad` the backward adds, the paths of those that have
            hooks of `register_post_accumulate_grad_hook`.
        operators: as in `TracedFunction`, of the forward and the backward together.
        tradeoff: the choices of what the forward saves, where limits may be set; None elsewhere.
    """

    vjp: Vjp
    first: TracedPart
    second: TracedPart
    halves: tuple[TracedPart, ...] = ()
    gradients: Mapping[str, GradientLayout] = field(default_factory=dict)
    hooked: tuple[str, ...] = ()
    operators: Callable[[], str] = str
    tradeoff: Tradeoff | None = None

    @property
    def parts(self) -> tuple[TracedPart, ...]:
        """All its functions, and those that these call."""
        own = (self.first, self.second, *self.halves)
        return (*own, *(called for part in own for called in part.called))


class FunctionTracer(Protocol):
    """Traces functions; implemented by `functions.py`, which says what the arguments are."""

    def trace(
        self, target: Target, signature: Tree, name: str, loc: Location | None
    ) -> TracedFunction: ...

    def trace_vjp(
        self,
        target: Target,
        signature: Tree,
        name: str,
        grad_outputs: tuple[int, ...],
        grad_inputs: tuple[int, ...],
        loc: Location | None,
        between: Sequence[Write] = (),
    ) -> TracedVjp: ...


@dataclass(frozen=True)
class TracedCall:
    """A call to trace.

    Attributes:
        shown: the call in words, such as `Stage.forward`.
        function: what is called.
        state: the state of the actor; empty for a function of values alone.
        signature: the arguments, a pytree `(args, kwargs)`.
        device: where values live.
        loc: where the step makes the call.
        home: where the method is defined.
        argument_objects: objects among the arguments that have attributes, with their names.
        float8: the linear layers of the actor that compute in float8, if any.
        is_of_mesh: whether ranks of a mesh make the call, which may have parts of its values.
    """

    shown: str
    function: Callable[..., Any]
    state: ActorState
    signature: Tree
    device: torch.device
    loc: Location | None
    home: Location | None
    argument_objects: tuple[tuple[Any, str], ...] = ()
    float8: Float8Use | None = None
    is_of_mesh: bool = False

    @property
    def declared_at(self) -> Location | None:
        """The line of the function: where the method is defined, or else where it is called."""
        return self.home or self.loc

    @property
    def error_loc(self) -> Location | None:
        """The line to name where no line of the method's body is known."""
        is_users = self.home is not None and is_user_file(self.home.file)
        return self.home if is_users else self.loc or self.home  # no line of cg helps a user

    def refusal(self, reason: str, remedy: str, loc: Location | None = None) -> TraceError:
        """The error for a call that cannot be traced."""
        message = f"{self.shown} cannot be traced: {reason}"
        return TraceError(message, loc=loc or self.error_loc, remedy=remedy)

    def values(self) -> list[tuple[TensorSpec | ObjectSpec, str]]:
        """The value leaves of the signature, each with its name in words."""
        return [
            (leaf, argument_name(self.signature, i))
            for i, leaf in enumerate(self.signature.leaves)
            if not isinstance(leaf, Static)
        ]


def result_spec(leaf: Any, call: TracedCall) -> Leaf:
    """The spec of one leaf of a call's result.

    Raises:
        TraceError: a graph cannot return it.
    """
    if not isinstance(leaf, torch.Tensor):
        if isinstance(leaf, SCALARS):
            return Static(leaf)
        raise call.refusal(
            f"it returns an object of type {type(leaf).__qualname__}", _remedy_for_objects(leaf)
        )
    if not isinstance(leaf, FakeTensor):
        raise call.refusal(
            "it returns a tensor that was made outside it",
            "keep the tensor in an attribute of the actor, or pass it as an argument",
        )
    if leaf.layout is not torch.strided:
        raise call.refusal(
            f"it returns a tensor of layout {leaf.layout}", "return a dense tensor (x.to_dense())"
        )
    try:
        ir_dtype(leaf.dtype)
    except ValueError as error:
        raise call.refusal(str(error), "") from None
    return TensorSpec(leaf.dtype, tuple(leaf.shape), leaf.requires_grad)


def _remedy_for_objects(leaf: Any) -> str:
    form = "return tensors and plain Python values in tuples, lists or dicts"
    if dataclasses.is_dataclass(leaf):
        name = type(leaf).__qualname__
        form = f"register the class once: torch.export.register_dataclass({name}); or {form}"
    return (
        f"{form}. Where no gradient flows through it, a method that is marked with @cg.opaque "
        "returns any object"
    )


def given_objects(signature: Tree) -> tuple[tuple[Any, str], ...]:
    """The arguments of a method that are objects with the user's attributes, with their names."""
    return tuple(
        (leaf.value, argument_name(signature, i))
        for i, leaf in enumerate(signature.leaves)
        if isinstance(leaf, Static) and not is_plain(leaf.value) and is_walked(leaf.value)
    )


def argument_name(signature: Tree, index: int) -> str:
    """A leaf of the arguments in words: `argument 1`, `argument 'mask'`."""
    numbered = pytree.tree_unflatten(range(len(signature.leaves)), signature.spec)
    path, _ = pytree.tree_flatten_with_path(numbered)[0][index]
    _, where, *inner = path
    within = f" at {pytree.keystr(tuple(inner))}" if inner else ""
    return f"argument {pytree.keystr((where,))[1:-1]}{within}"


Owner: TypeAlias = tuple[int, ...] | None
"""The ranks that trace a function: the first one tells all others. None: every rank traces it."""

VjpKey: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]


@dataclass(eq=False, slots=True)
class Callee:
    """A declared function of the step.

    Attributes:
        declaration: its entry in the module.
        results: the pytree that a call returns.
        state_outputs, refers, changes: as of the traced function.
        signature: the pytree `(args, kwargs)` that it was traced with.
        target: what to trace; None if another process plays the actor.
        owner: the ranks that trace it; None if every rank does.
        specs: the results that are values.
        needed: which of its operands require a gradient.
        differentiable: whether any of its results requires one.
        propagates_grad: whether its results may lack a gradient if an operand may lack one.
        may_accumulate: whether it is opaque, and so might send gradients to its operands and its
            actor's parameters in plain Python; cg sends none.
        symbol: its name, for ops.
        base: the name from which those of its results derive.
        is_single: whether its result is one value and nothing else.
        shares: whether its results may share memory with anything.
        views: pairs (result, operand) that may share memory in plain Python.
        reaching: for each result, the operands that its gradient may go to.
        vjps: its derivatives so far, by the masks of outputs and inputs that were requested, and by
            the functions that may write to its actor in between. A derivative's masks are exact.
        strict_body: as `TracedFunction.strict`; None where it cannot run.
        strict: the name of that body in the module, once it is there.
    """

    declaration: Function
    results: Tree
    state_outputs: tuple[int, ...]
    signature: Tree
    target: Target | None
    owner: Owner
    specs: tuple[TensorSpec | ObjectSpec, ...]
    needed: tuple[bool, ...]
    differentiable: bool
    propagates_grad: bool
    may_accumulate: bool
    symbol: Symbol
    base: str
    is_single: bool
    shares: bool
    views: tuple[tuple[int, int], ...]
    reaching: tuple[tuple[int, ...], ...]
    refers: frozenset[str]
    changes: frozenset[str] | None
    vjps: dict[VjpKey, Symbol] = field(default_factory=dict)
    strict_body: Bodies | None = None
    strict: Symbol | None = None
    _types: dict[Place, tuple[Type, ...]] = field(default_factory=dict)

    def types_at(self, place: Place) -> tuple[Type, ...]:
        """The types of the results of a call at `place`."""
        types = self._types.get(place)
        if types is None:
            types = tuple(relocate(type_, place) for type_ in self.declaration.outputs)
            self._types[place] = types
        return types


def value_leaves(tree: Tree) -> tuple[TensorSpec | ObjectSpec, ...]:
    """The specs of the leaves that are values, in order."""
    return tuple(cast("TensorSpec | ObjectSpec", tree.leaves[i]) for i in tree.values)


def requires_grad(spec: TensorSpec | ObjectSpec) -> bool:
    """True if gradients flow through a value."""
    return isinstance(spec, TensorSpec) and spec.requires_grad
