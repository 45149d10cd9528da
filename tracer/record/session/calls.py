"""Record calls: agree with all ranks on a function once, then append an op for each call."""

from __future__ import annotations

import hashlib
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch.utils._pytree import tree_structure, tree_unflatten

from ....ir.attributes import Effect, Symbol
from ....ir.flops import NO_FLOPS
from ....ir.location import Location
from ....ir.ops import Call
from ....ir.ops.module import Function, FunctionKind, Module, Program
from ....ir.phases import Phase
from ....ir.text.differences import disagreement
from ....ir.text.printer import format_module
from ....ir.types import Place, UnitType
from ...errors import TraceError
from ...source import traceback_location
from ...values.interface import (
    Callee,
    Owner,
    Peers,
    Target,
    TracedFunction,
    TracedPart,
    Write,
    requires_grad,
    value_leaves,
)
from ...values.specs import TensorSpec, Tree
from ...values.values import ObjectValue, TracedTensor, share, storage_of
from .arguments import Arguments
from .session import Session

L = TypeVar("L")
P = TypeVar("P")

Subject: TypeAlias = Callable[[], tuple[Target | None, Owner, str]]


def find_or_declare(
    session: Session, called: Any, arguments: Arguments, subject: Subject, loc: Location | None
) -> Callee:
    """Find the function of a call, or declare it; the ranks that own it trace it.

    Args:
        session: the trace.
        called: a key of the callable; two calls of it with equal arguments share one function.
        arguments: the arguments of the call.
        subject: gives the target (None if another process plays the actor), the ranks that trace
            it (None if every rank does), and the name, before it is made unique.
        loc: the user's line.

    Raises:
        TraceError: the function cannot be traced; the same error on every rank.
    """
    grad = torch.is_grad_enabled()
    key = (called, grad, arguments.key)
    callee = session.callees.get(key)
    if callee is None:
        callee = _declare(session, *subject(), arguments.signature(), grad, loc)
        session.callees[key] = callee
    return callee


def _declare(
    session: Session,
    target: Target | None,
    owner: Owner,
    base: str,
    signature: Tree,
    grad: bool,
    loc: Location | None,
) -> Callee:
    """Trace a function on its owners, and enter it into the module on every rank."""
    session.refuse_new(base, loc)
    name = session.function_names.fresh(base)

    def trace() -> tuple[TracedFunction, tuple[Any, ...]]:
        assert target is not None, "only the owner of an actor traces its methods"
        with tracing(session, name, loc):
            traced = session.tracer.trace(target, signature, name, loc)
        results = traced.results
        skeleton = tree_unflatten(list(range(len(results.leaves))), results.spec)
        views = tuple(dict.fromkeys((*traced.declaration.aliases, *traced.views)))
        called = tuple(map(public_part, traced.parts))
        public = (called, results.leaves, skeleton, traced.state_outputs, views, traced.reaching)
        return traced, (*public, traced.refers, traced.changes)

    types = ", ".join(map(str, signature.types()))
    own_function, public = agree(session.peers, owner, trace, name, loc, types, _function_text)
    called, leaves, skeleton, state_outputs, views, reaching, refers, changes = public
    declaration = enter(session, called, () if own_function is None else own_function.parts)
    if own_function is not None:
        session.bodies.update(own_function.host_state)
        if own_function.guard is not None:
            session.guards[name] = own_function.guard
    results = Tree(leaves, tree_structure(skeleton))
    specs = value_leaves(results)
    if not grad:
        specs = tuple(
            replace(spec, requires_grad=False) if isinstance(spec, TensorSpec) else spec
            for spec in specs
        )
    is_opaque = declaration.kind is FunctionKind.OPAQUE
    several = declaration.actor is not None and len(specs) > 1
    return Callee(
        declaration=declaration,
        results=results,
        state_outputs=state_outputs,
        signature=signature,
        target=target,
        owner=owner,
        specs=specs,
        needed=tuple(grad and requires_grad(spec) for spec in value_leaves(signature)),
        differentiable=any(requires_grad(spec) for spec in specs),
        propagates_grad=grad and base not in _DETACHING,
        may_accumulate=grad and is_opaque and declaration.actor is not None,
        symbol=Symbol(name),
        base=base.rpartition(".")[2],
        is_single=len(specs) == 1 and results.spec.is_leaf(),
        shares=bool(views or state_outputs) or is_opaque or several,
        views=views,
        reaching=reaching,
        refers=refers,
        changes=changes,
        strict_body=None if own_function is None else own_function.strict,
    )


_DETACHING = frozenset({"torch.detach", "torch.detach_"})


@contextmanager
def tracing(session: Session, name: str, loc: Location | None) -> Iterator[None]:
    """Trace a function inside the `with` block: nothing is recorded, and errors name the line."""
    try:
        with session.pause(f"the traced function @{name}"):
            yield
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(
            f"@{name} raised {type(error).__name__} while it was traced: {error}",
            loc=traceback_location(error.__traceback__) or loc,
        ) from error


def agree(
    peers: Peers,
    owner: Owner,
    make: Callable[[], tuple[L, P]],
    name: str,
    loc: Location | None,
    types: str = "",
    text_of: Callable[[L, P], str] = lambda own, public: "",
) -> tuple[L | None, P]:
    """Make an object on its owners, and broadcast its public part to every rank.

    If there are several owners, each makes its own object, and all ranks get the public part of
    the first owner's. All owners must have made the same.

    Args:
        peers: the world.
        owner: the ranks that make the object; None: every rank, for itself.
        make: makes the object, and its public part, which can be pickled.
        name: the name of the object, which ranks compare.
        loc: the user's line.
        types: the types of the arguments, which ranks compare as well.
        text_of: writes down what several owners must have made alike.

    Returns:
        The object, or None on other ranks; and the public part of the first owner's object.

    Raises:
        TraceError: the object could not be made, which is raised on every rank; or the first owner
            has come to another call than this rank.
    """
    if owner is None:
        return make()
    own_result: tuple[L, P] | None = None
    answer: Any = None
    text = ""
    if any(map(peers.plays, owner)):
        try:
            own_result = make()
            text = text_of(*own_result) if len(owner) > 1 else ""
            answer = _packed((name, types, own_result[1]), name, loc), _digest(text)
        except TraceError as error:
            answer = error
    heard = peers.broadcast(answer, owner[0])
    if len(owner) > 1:
        _compare(peers, answer, heard, text, name, loc)
    if isinstance(answer, TraceError):
        raise answer
    if isinstance(heard, TraceError):
        raise heard
    if own_result is not None and len(owner) == 1:
        return own_result
    owner_name, owner_types, public = _unpacked(heard[0])
    if (owner_name, owner_types) != (name, types):
        alike = owner_name == name
        raise TraceError(
            f"this rank has come to the call of @{name}{f' for {types}' if alike else ''}, and "
            f"rank {owner[0]} to that of @{owner_name}{f' for {owner_types}' if alike else ''}",
            loc=loc,
            remedy="make the same actors, and the same calls in the step, on all ranks: look for a "
            "branch that depends on the rank, on time, on unseeded random numbers, or on the order "
            "of a set, and for an actor that one rank alone has made, or in another order",
        )
    return None if own_result is None else own_result[0], public


def _compare(
    peers: Peers, answer: Any, heard: Any, text: str, name: str, loc: Location | None
) -> None:
    """Compare the objects that several owners have made.

    Raises:
        TraceError: an owner could not make its object, or has made another one than the first
            owner; raised on every rank.
    """
    failed = answer if isinstance(answer, TraceError) else None
    differs = isinstance(answer, tuple) and isinstance(heard, tuple) and answer[1] != heard[1]
    reports = peers.allgather((failed, differs))
    for error, _ in reports:
        if error is not None:
            raise error if failed is None else failed
    if any(differs for _, differs in reports):
        texts = peers.allgather(text or None)
        raise TraceError(
            f"ranks have traced @{name} to different functions: {disagreement(texts).rstrip()}",
            loc=loc,
            remedy="let the ranks of a mesh make the same object, and change its attributes alike: "
            "look for a branch that depends on the rank, on time, or on unseeded random numbers",
        )


def _function_text(own: TracedFunction | None, public: tuple[Any, ...]) -> str:
    return text_of_parts(public[0]) + ("" if own is None else own.operators())


def text_of_parts(parts: Sequence[PublicPart]) -> str:
    """The text of functions that several ranks have traced.

    It leaves out counts of operations and of bytes, which differ if pieces are uneven.
    """
    functions = {f.name: replace(f, flops=NO_FLOPS, workspace=0, resting=0) for f, _ in parts}
    bodies = {f.name: program for f, program in parts if program is not None}
    module = Module("parts", Phase.TRACED, 1, functions=functions, bodies=bodies)
    return format_module(module) if parts else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _unpacked(content: bytes) -> Any:
    """Load the bytes that `_packed` made, without torch's warnings about loading tree specs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return pickle.loads(content)


def _packed(value: object, name: str, loc: Location | None) -> bytes:
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TraceError(
            f"@{name} returns something besides tensors that the other ranks cannot be told of: "
            f"{error}",
            loc=loc,
            remedy="return tensors and plain values, or mark the method @cg.opaque",
        ) from error


PublicPart: TypeAlias = tuple[Function, Program | None]
"""The part of a function that all ranks know: its declaration, and its body if it is a program."""


def public_part(part: TracedPart) -> PublicPart:
    """The part of a function that all ranks know."""
    return part.declaration, part.program


def enter(
    session: Session, parts: Sequence[PublicPart], own_parts: Sequence[TracedPart]
) -> Function:
    """Enter functions into the module, and their bodies into the session.

    Args:
        session: the trace.
        parts: a function, and the functions that it calls.
        own_parts: the functions with their bodies; empty on ranks that cannot run them.

    Returns:
        The first function.
    """
    for index, (declaration, program) in enumerate(parts):
        body = own_parts[index].body if own_parts else None
        if not declaration.outputs:
            # A call needs a result: its type says where the call runs.
            declaration = replace(declaration, outputs=(UnitType(),))
        session.module.functions[declaration.name] = declaration
        if program is not None:
            session.module.bodies[declaration.name] = program
        if body is not None:
            session.bodies[declaration.name] = body
    return session.module.functions[parts[0][0].name]


def record(
    session: Session, callee: Callee, arguments: Arguments, place: Place, loc: Location | None
) -> Any:
    """Append a call to the program.

    Returns:
        The pytree of results that the step's Python gets: traced tensors and objects.
    """
    fresh, base = session.new_value, callee.base
    declaration = callee.declaration
    op = Call(
        tuple([traced.value for traced in arguments.operands]),
        tuple([fresh(base, type_) for type_ in callee.types_at(place)]),
        fn=callee.symbol,
        key=session.next_key() if declaration.random else None,
        loc=loc,
        mb=session.mb,
    )
    session.emit(op)
    session.tape.record(op, callee, callee.needed, session.last)
    hold = session.hold
    results = [hold(value, spec) for value, spec in zip(op.results, callee.specs, strict=False)]
    if declaration.effect.changes_state:
        _note_effect(session, callee)
    if callee.shares:
        _note_sharing(session, callee, arguments.values, results)
    return results[0] if callee.is_single else callee.results.fill(results)


def _note_sharing(
    session: Session,
    callee: Callee,
    arguments: Sequence[TracedTensor | ObjectValue],
    results: Sequence[TracedTensor | ObjectValue],
) -> None:
    """Note the values that may share memory after a call, and those that must not be written to."""
    declaration = callee.declaration
    for output, input_ in callee.views:
        result, argument = results[output], arguments[input_]
        if isinstance(result, TracedTensor) and isinstance(argument, TracedTensor):
            share(result, argument)
    actor = declaration.actor
    if actor is None:
        return
    tensors = [value for value in results if isinstance(value, TracedTensor)]
    for tensor in tensors[1:]:
        share(tensors[0], tensor)  # they may be views of each other
    if declaration.kind is FunctionKind.OPAQUE:
        for value in (*arguments, *results):
            if isinstance(value, TracedTensor):
                storage_of(value).pinned = f"the opaque method @{declaration.name} may have kept it"
    for output in callee.state_outputs:
        value = results[output]
        if isinstance(value, TracedTensor):
            storage = storage_of(value)
            storage.pinned = f"it is state of the actor {actor}"
            storage.actor, storage.writes = actor, len(session.writes.get(actor, ()))
            storage.state |= callee.refers


def _note_effect(session: Session, callee: Callee) -> None:
    """Write down that the last call changes the state of its actor, and of actors that share it."""
    declaration, op = callee.declaration, session.module.program.ops[-1]
    if declaration.actor is None:
        return
    for actor, effect in ((declaration.actor, declaration.effect), *declaration.shares.effects):
        if effect.changes_state:
            changes = callee.changes if actor == declaration.actor else None
            session.writes.setdefault(actor, []).append(changes)
        if effect is Effect.WRITE:
            # No backward reads state that an update changes (tracer/function/effects.py).
            written = session.written.setdefault(actor, [])
            written.append((session.last, Write(declaration.name, op.loc)))
