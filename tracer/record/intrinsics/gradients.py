"""`cg.backward`: record a backward, and agree on the derivatives of the calls that it reaches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from ....ir.attributes import Symbol
from ....ir.location import Location
from ....ir.ops import Backward, Value
from ....ir.ops.module import Vjp
from ....ir.pipeline.tradeoff import Tradeoff
from ...errors import TraceError
from ...source import caller_location
from ...values.gradient_buckets import GradientLayout
from ...values.interface import Callee, TracedVjp, VjpKey, Write
from ...values.specs import TensorSpec
from ...values.values import ObjectValue, TracedTensor
from ..groups.gradient_sums import note_gradients
from ..session.calls import PublicPart, agree, enter, public_part, text_of_parts, tracing
from ..session.session import Session, recording
from ..session.tape import ReachedCall, TapeEntry
from .hook_calls import record_hooks


def backward(*losses: torch.Tensor) -> None:
    """Add the gradients of the sum of `losses` to `.grad` of the actors' parameters.

    Behind it run the hooks that `register_post_accumulate_grad_hook` has put on these parameters.
    Outside of a step this is `torch.autograd.backward(losses)`.

    Args:
        losses: scalars that depend on actors' parameters.

    Raises:
        TraceError: there are no losses, or one is not such a scalar; an earlier backward has gone
            through the same call; a loss depends on an input of the step that requires a
            gradient; or a derivative cannot be traced.
    """
    session = recording("cg.backward")
    loc = caller_location(2)
    if not losses:
        raise TraceError("cg.backward of no loss", loc=loc, remedy="give it at least one loss")
    if session is None:
        torch.autograd.backward(losses)
        return
    values = [_loss(session, loss, loc) for loss in losses]
    op = Backward(tuple(values), (), loc=loc, mb=session.mb)
    entries, calls, strays = _reached(session, values, loc)
    _refuse_strays(strays, loc)
    for entry in entries:
        _spend(entry, op, loc)
    for reached in calls:
        key, _ = _key(session, reached)
        vjp = reached.call.vjp = reached.callee.vjps[key]
        if (actor := reached.callee.declaration.actor) in session.groups:
            note_gradients(session, actor, session.gradients[vjp.name], loc)
    for call, callee in session.tape.opaque_sources(values):
        call.fn = _strict(session, callee)
    session.emit(op)
    record_hooks(session, calls, loc)


def _strict(session: Session, callee: Callee) -> Symbol:
    """The symbol of an opaque function that raises if a gradient is lost when it runs."""
    if callee.strict is None:
        session.refuse_new(f"the derivative of {callee.declaration.name}", callee.declaration.loc)
        name = session.function_names.fresh(f"{callee.declaration.name}.strict")
        session.module.functions[name] = replace(callee.declaration, name=name)
        if callee.target is not None:
            assert callee.strict_body is not None, "an opaque function has a strict body"
            session.bodies[name] = callee.strict_body
        callee.strict = Symbol(name)
    return callee.strict


def _loss(session: Session, loss: object, loc: Location | None) -> Value:
    if isinstance(loss, ObjectValue):
        loss.refuse_as_tensor("cg.backward of")
    remedy = "give it scalars that actors' methods or torch functions in the step returned"
    traced = session.use_tensor(loss, "cg.backward", loc, remedy)
    spec, name = traced.spec, traced.value.name
    assert isinstance(spec, TensorSpec)
    if spec.dtype.is_complex or torch.Size(spec.shape).numel() != 1:
        raise TraceError(
            f"cg.backward of %{name}, which is {traced.value.type} and not a real scalar",
            loc=loc,
            remedy="reduce it, for example by .mean() or .sum()",
        )
    if not spec.requires_grad:
        raise TraceError(
            f"cg.backward of %{name}, which does not depend on anything that requires a gradient",
            loc=loc,
            remedy="compute it from actors whose parameters require gradients, outside of "
            "torch.no_grad and without .detach()",
        )
    sources = session.tape.opaque_sources([traced.value])
    blocking = next((call for call, callee in sources if any(callee.needed)), None)
    if blocking is not None:
        raise TraceError(
            f"cg.backward of %{name}, which depends on what the opaque method {blocking.fn} made "
            f"of values that require gradients ({blocking.loc}); no gradient flows through it",
            loc=loc,
            remedy="pass x.detach() to the opaque method if that is what you want, or write it so "
            "that it can be traced",
        )
    if spec.shape:
        assert isinstance(loss, TracedTensor)
        loss = loss.reshape(())
    assert isinstance(loss, TracedTensor)
    return loss.traced.value


def _refuse_strays(strays: list[Value], loc: Location | None) -> None:
    for value in strays:
        raise TraceError(
            f"cg.backward reaches %{value.name}, an input of the step that requires a gradient; a "
            "compiled step gives gradients to actors' parameters only",
            loc=loc,
            remedy="pass it as x.detach(), or let an actor own it as a parameter",
        )


def _spend(entry: TapeEntry, op: Backward, loc: Location | None) -> None:
    if entry.spent is not None:
        first = f", first at {entry.spent.loc}" if entry.spent.loc is not None else ""
        where = f" of {entry.op.loc}" if entry.op.loc is not None else ""
        raise TraceError(
            f"cg.backward goes a second time through the call{where}{first}; what the call saved "
            "for its gradient is used up",
            loc=loc,
            remedy="give all losses to one cg.backward(a, b), or call the method again",
        )
    entry.spent = op


def _reached(
    session: Session, losses: list[Value], loc: Location | None
) -> tuple[list[TapeEntry], list[ReachedCall], list[Value]]:
    """The result of `Tape.reach` for a backward, after all its calls have derivatives.

    A call first asks for the gradients of all operands that may need them. Its derivative may give
    fewer, and then the backward may reach fewer calls. So this is repeated until nothing changes.
    """

    def inputs_of(reached: ReachedCall) -> tuple[int, ...]:
        symbol = reached.callee.vjps.get(_key(session, reached)[0])
        return (
            reached.grad_inputs if symbol is None else session.module.vjps[symbol.name].grad_inputs
        )

    while True:
        entries, calls, strays = session.tape.reach(losses, inputs_of)
        if not _derive(session, calls, loc):
            return entries, calls, strays


def _derive(session: Session, calls: list[ReachedCall], loc: Location | None) -> bool:
    """Make the derivatives that the calls lack for their masks.

    Each rank first traces the derivatives of its own actors. Only then do the ranks exchange them,
    so that they trace in parallel.

    Returns:
        True if a derivative gives fewer gradients than it was asked for.
    """
    is_less = False
    new_derivatives: list[tuple[ReachedCall, str, TracedVjp | TraceError | None]] = []
    for reached in calls:
        key, between = _key(session, reached)
        callee = reached.callee
        if key not in callee.vjps:
            session.refuse_new(f"the derivative of {callee.declaration.name}", loc)
            name = session.function_names.fresh(f"{callee.declaration.name}.vjp")
            callee.vjps[key] = Symbol(name)
            new_derivatives.append((reached, name, _trace(session, reached, name, between)))
    for reached, name, traced in new_derivatives:
        vjp = _tell(session, reached.callee, name, traced, loc)
        is_less |= vjp.grad_inputs != reached.grad_inputs
    return is_less


def _key(session: Session, reached: ReachedCall) -> tuple[VjpKey, tuple[Write, ...]]:
    """The key of a derivative among those of its function, and the writes since the call.

    The writes are those to the function's actor, one for each function that writes, by name.
    """
    actor = reached.callee.declaration.actor
    written = session.written.get(actor, []) if actor is not None else []
    first = bisect_right(written, reached.entry.at, key=lambda indexed_write: indexed_write[0])
    writes = {write.function: write for _, write in written[first:]}
    between = tuple(writes[name] for name in sorted(writes))
    return (reached.grad_outputs, reached.grad_inputs, tuple(sorted(writes))), between


def _trace(
    session: Session, reached: ReachedCall, name: str, between: tuple[Write, ...]
) -> TracedVjp | TraceError | None:
    callee = reached.callee
    target = callee.target
    if target is None:
        return None
    try:
        with torch.enable_grad(), tracing(session, name, reached.call.loc):
            return session.tracer.trace_vjp(
                target,
                callee.signature,
                name,
                reached.grad_outputs,
                reached.grad_inputs,
                reached.call.loc,
                between,
            )
    except TraceError as error:
        return error


_PublicVjp: TypeAlias = tuple[
    Vjp, list[PublicPart], Mapping[str, GradientLayout], tuple[str, ...], Tradeoff | None
]
"""What all ranks know of a derivative."""


def _tell(
    session: Session,
    callee: Callee,
    name: str,
    traced: TracedVjp | TraceError | None,
    loc: Location | None,
) -> Vjp:
    """Enter a derivative into the module on every rank, and its bodies where it was traced.

    Raises:
        TraceError: the derivative could not be traced; raised on every rank.
    """

    def make_vjp() -> tuple[TracedVjp, _PublicVjp]:
        assert traced is not None, "only the owner of an actor traces its methods"
        if isinstance(traced, TraceError):
            raise traced
        parts = list(map(public_part, traced.parts))
        return traced, (traced.vjp, parts, traced.gradients, traced.hooked, traced.tradeoff)

    own_vjp, (vjp, parts, gradients, hooked, tradeoff) = agree(
        session.peers,
        callee.owner,
        make_vjp,
        name,
        loc,
        text_of=_vjp_text,
    )
    session.module.vjps[vjp.name] = vjp
    session.gradients[vjp.name] = gradients
    session.hooked[vjp.name] = hooked
    if tradeoff is not None:
        session.tradeoffs[vjp.name] = tradeoff
    enter(session, parts, () if own_vjp is None else own_vjp.parts)
    return vjp


def _vjp_text(own: TracedVjp | None, public: tuple[Any, ...]) -> str:
    hooks = f"hooks: {', '.join(public[3])}\n" if public[3] else ""
    return text_of_parts(public[1]) + hooks + ("" if own is None else own.operators())
