"""Trace a step: run its Python over values without elements, and record the calls it makes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...ir.location import Location
from ...ir.ops import Return, Value
from ...ir.ops.module import FunctionKind
from ...ir.types import Place
from ...ir.verify.verifier import verify
from ..errors import TraceError, refusals_raised
from ..method.binding import definition
from ..source import caller_location, traceback_location
from ..values.actor_state import collect
from ..values.interface import Callee, FunctionTracer, MethodTarget, Peers
from ..values.specs import Leaf, Static, Tree, ir_type
from ..values.values import NotAValue, ObjectValue, TracedTensor, storage_of
from .actors.apart import refuse_apart
from .collector import collector_paused
from .groups.gradient_sums import finish_gradients
from .groups.group_calls import layout_of, moved
from .opaque_checks import recheck, watch_arguments
from .recorder import Recorder, training_refused
from .repeat import record_twice
from .session.inputs import InputError, InputSpec, leaf_spec, name_leaves
from .session.session import Session, current, entered
from .trace import OutputSpec, PlainArguments, Trace


@collector_paused()
def trace_step(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    peers: Peers,
    inputs: Place | None = None,
    outputs: Place | None = None,
    name: str,
    tracer: FunctionTracer,
    optimistic: bool = False,
    remat: frozenset[str] = frozenset(),
    host_only: bool = False,
) -> Trace:
    """Trace a step for arguments like `args` and `kwargs`. Collective: all ranks trace together.

    Args:
        fn: the step.
        args, kwargs: pytrees of tensors, `OBJECT` and static values. Only the dtype, shape and
            `requires_grad` of tensors matter.
        peers: the world.
        inputs: the ranks that call the step with arguments; all if None.
        outputs: the ranks that get the step's results; all if None.
        name: the name of the module.
        tracer: traces actors' methods and torch functions.
        optimistic: whether to assume that no gradients have to be clipped. If so, the traced step
            returns a pair on all ranks: the step's result, and a tuple of scalars. The result is
            right if all scalars are true.
        remat: the names of the actors whose methods are called as by `cg.remat`.
        host_only: as in `InputSpec`.

    Returns:
        The trace.

    Raises:
        TraceError: the step does something that cannot be compiled.
        InputError: the step cannot take these arguments.
    """
    if current() is not None:
        raise TraceError(
            f"step {name} is traced inside another step that is being traced",
            loc=caller_location(),
            remedy="call the plain Python function from the step",
        )
    session = Session.start(_symbol(name), peers, tracer)
    session.optimistic, session.remat = optimistic, remat
    source = _place(session, inputs, "inputs", name)
    target = _place(session, outputs, "outputs", name)
    spec = describe_inputs(fn, args, kwargs, name, source, host_only)
    loc = definition(fn)

    def record(session: Session) -> None:
        held_args, held_kwargs = spec.tree.fill(_parameters(session, spec))
        with entered(session), refusals_raised(), training_refused(), Recorder(session):
            try:
                result = _separate(fn(*held_args, **held_kwargs))
            except Exception as error:
                refused = _of_compiler(error, name)
                if refused is None:
                    raise
                raise refused from error
        session.recorder = None  # a cycle would outlive the trace
        if optimistic:
            # Every rank has to know whether the result is right.
            result = (result, tuple(session.assumptions))
        finish_gradients(session)
        session.results = _return(session, result, at, loc)

    at = session.everywhere if optimistic else target
    record_twice(record, session, fn, name, loc)
    verify(session.module)
    refuse_apart(session)
    recheck(session)
    watch_arguments(session)
    instances = {
        id(instance): instance
        for callee in session.callees.values()
        if isinstance(callee.target, MethodTarget)
        for instance in _instances(callee.target)
    }
    owners = {callee.declaration.name: callee.owner for callee in session.callees.values()}
    return Trace(
        session.module,
        session.bodies,
        session.constants,
        replace(spec, dtype=_baked_dtype(session)),
        OutputSpec(session.results, at),
        tuple((guard, owners[name]) for name, guard in session.guards.items()),
        tuple(instances.values()),
        tuple(map(_plain_arguments, session.callees.values())),
        session.tradeoffs,
        _in_float8(session),
    )


def _in_float8(session: Session) -> tuple[str, ...]:
    """A line for each weight of this process's actors that a plan names by `cg.float8`."""
    lines: dict[str, None] = {}
    for callee in session.callees.values():
        target = callee.target
        if isinstance(target, MethodTarget) and target.float8 is not None:
            group = None if target.group is None else target.group.actor
            state = collect(target.instance) if group is None else group.state(group.first)
            lines.update(dict.fromkeys(target.float8.describe(target.actor, state.tensors)))
    return tuple(lines)


def _instances(target: MethodTarget) -> tuple[Any, ...]:
    """The instances of a method's actor on the ranks that this process plays."""
    if target.group is None or target.group.actor is None:
        return (target.instance,)
    return tuple(target.group.actor.instances.values())


def _of_compiler(error: Exception, name: str) -> TraceError | None:
    """The error for an exception of torch's compiler; None for any other exception."""
    if not type(error).__module__.startswith("torch._dynamo"):
        return None
    return TraceError(
        f"step {name} calls torch.cond, another operator that needs torch's compiler, or what "
        "torch.compile has made; the trace of a step cannot be compiled by that",
        loc=traceback_location(error.__traceback__),
        remedy="use torch.where, which computes both branches, or branch in an actor's method that "
        "is marked @cg.opaque; compile(fuse='inductor') of the step makes fused kernels",
    )


def _baked_dtype(session: Session) -> torch.dtype | None:
    kinds = [function.kind for function in session.module.functions.values()]
    is_baked = FunctionKind.GRAPH in kinds or bool(session.constants)
    return session.ambient.dtype if is_baked else None


def _plain_arguments(callee: Callee) -> PlainArguments:
    leaves = (leaf.value for leaf in callee.signature.leaves if isinstance(leaf, Static))
    values = tuple(repr(value) for value in leaves if type(value) in _PLAIN)
    return PlainArguments(callee.declaration.name, callee.declaration.loc, values)


_PLAIN = frozenset({int, float, complex, bool, slice})
"""The types of arguments that ranks compare. A string may name a device, which ranks differ in."""


def _symbol(name: str) -> str:
    """The name as a symbol of the IR's text form."""
    return re.sub(r"[^\w.]", "_", name)


def _place(session: Session, place: Place | None, role: str, name: str) -> Place:
    if place is None:
        return session.everywhere
    lacking = [rank for rank in place.ranks if not 0 <= rank < session.peers.size]
    if lacking:
        raise TraceError(
            f"{role} of step {name} at rank {lacking[0]}, but the world has ranks "
            f"0..{session.peers.size - 1}",
            remedy="start more ranks, or name existing ones",
        )
    return place


def describe_inputs(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    place: Place,
    host_only: bool,
) -> InputSpec:
    """The specs and names of the arguments for which a step is traced.

    Args:
        fn: the step.
        args, kwargs: the arguments, as in `trace_step`.
        name: the step's name.
        place: the ranks that call the step with arguments.
        host_only: as in `InputSpec`.

    Raises:
        InputError: the step cannot take the arguments.
    """
    leaves, spec = tree_flatten((args, kwargs))
    tree = Tree(tuple(map(leaf_spec, leaves)), spec)
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        raise InputError(
            f"step {name} is made of {fn!r}, which does not say what arguments it takes; write a "
            "Python function around it"
        ) from None
    return InputSpec(name, tree, name_leaves(name, signature, spec), place, signature, host_only)


def _parameters(session: Session, spec: InputSpec) -> list[TracedTensor | ObjectValue]:
    """Make the parameters of the program, and the values that the step's Python gets for them."""
    parameters = []
    for index in spec.tree.values:
        leaf, name = spec.tree.leaves[index], spec.names[index]
        assert not isinstance(leaf, Static)
        try:
            type_ = ir_type(leaf, spec.place)
        except ValueError as error:
            raise InputError(f"argument {name} of {spec.step}(): {error}") from None
        value = session.new_value(_symbol(name), type_)
        session.module.program.params.append(value)
        parameter = session.hold(value, leaf)
        if isinstance(parameter, TracedTensor):
            storage_of(parameter).pinned = "it is an input of the step, which the caller holds"
        parameters.append(parameter)
    return parameters


def _separate(result: Any) -> Any:
    """The step's result, with a copy of each tensor whose value it returns more than once.

    A collective gives several tensors for one value, and the caller may write to each of them.
    """
    leaves, spec = tree_flatten(result)
    first: dict[Value, TracedTensor] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, TracedTensor) and first.setdefault(leaf.traced.value, leaf) is not leaf:
            leaves[index] = leaf.detach().clone()
    return tree_unflatten(leaves, spec)


_STATIC_OUTPUTS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)


def _return(session: Session, result: Any, at: Place, loc: Location | None) -> Tree:
    """Append the `return`, and give the pytree of specs of the step's results."""
    leaves, spec = tree_flatten(result)
    values: list[Value] = []
    specs: list[Leaf] = []
    for leaf in leaves:
        if isinstance(leaf, TracedTensor | ObjectValue):
            traced = session.use(leaf)
            if isinstance(leaf, TracedTensor) and layout_of(traced) is not None:
                traced = moved(session, leaf, at, None, loc).traced  # the caller gets all of it
            values.append(traced.value)
            specs.append(traced.spec)
        else:
            specs.append(_static_output(leaf, session.module.name, loc))
    session.emit(Return(tuple(values), (), at=at))
    return Tree(tuple(specs), spec)


def _static_output(leaf: Any, name: str, loc: Location | None) -> Leaf:
    if isinstance(leaf, torch.Tensor):
        raise TraceError(
            f"step {name} returns a real tensor that nothing in the step has made",
            loc=loc,
            remedy="pass the tensor to the step as an argument, or do not return it",
        )
    if isinstance(leaf, NotAValue):
        raise TraceError(
            f"step {name} returns {leaf!r}, {leaf.what_it_is}",
            loc=loc,
            remedy="return what its methods return",
        )
    if is_dataclass(leaf):
        kind = type(leaf).__name__
        raise TraceError(
            f"step {name} returns a {kind}, a dataclass that is not registered as a pytree",
            loc=loc,
            remedy=f"call torch.export.register_dataclass({kind}) once, or return its fields in a "
            "tuple or a dictionary",
        )
    if not isinstance(leaf, _STATIC_OUTPUTS):
        raise TraceError(
            f"step {name} returns a {type(leaf).__name__}, which nothing in the step has made",
            loc=loc,
            remedy="return tensors, objects that actors' methods returned, numbers or strings, in "
            "tuples, lists or dictionaries",
        )
    return Static(leaf)
