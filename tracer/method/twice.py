"""Run a traced call a second time: a difference shows that it depends on hidden state.

A method may read a generator, an iterator, a counter or the clock. The trace would read it once,
and every execution would use that value. Nobody can list all such state. So the call runs twice,
and its operators, constants and results are compared.
"""

from __future__ import annotations

from dataclasses import replace

from ...ir.location import Location
from ..errors import TraceError
from ..values.actor_state import ActorState, collect
from ..values.interface import TracedCall
from .joint import Wanted, run_call, trace_call
from .joint_graph import Joint
from .purity.op_log import OpLog
from .purity.watch import UsesGradients
from .reuse.blocks import Blocks

_REMEDY = (
    "draw with torch functions, which a step seeds by itself; hand over what changes as an "
    "argument, or keep it in a buffer of the actor; or mark the method with @cg.opaque"
)


def settled(
    call: TracedCall, wanted: Wanted | None = None, blocks: Blocks | None = None
) -> tuple[TracedCall, Joint]:
    """Trace a call, as `trace_call` does, after the changes that only its first call makes.

    Such a change is an attribute that is made when it is first needed. The actor keeps it, as after
    an eager call, and the guard compares it in every execution.

    Args:
        call: the call.
        wanted: the derivative to trace as well, if any.
        blocks: blocks that modules may be copies of.

    Returns:
        The call, on the actor after these changes, and its trace.

    Raises:
        TraceError: it cannot be traced, or every call makes a change that a graph cannot make.
        UsesGradients: it works on gradients.
    """
    joint = trace_call(call, wanted, blocks)
    if not joint.initial:
        return call, joint
    try:
        for initialization in joint.initial:
            initialization.change.put(initialization.change.after)
        call = replace(call, state=_collected_again(call))
        second = _without_changes(call, wanted, joint)
    except BaseException:
        for initialization in joint.initial:
            initialization.change.put(initialization.change.before)
        raise
    for initialization in joint.initial:
        if initialization.owner is not None:
            second.reads[initialization.owner].add(str(initialization.change.key))
    return call, second


def _collected_again(call: TracedCall) -> ActorState:
    """The state of a call's actor now; pieces stay pieces, and tensors are used where they were."""
    state = collect(call.state.objects[0][0], call.argument_objects)
    before = {id(tensor.tensor): tensor for tensor in call.state.tensors}
    for number, tensor in enumerate(state.tensors):
        known = before.get(id(tensor.tensor))
        if known is not None:
            state.tensors[number] = replace(tensor, whole=known.whole, used_on=known.used_on)
    return state


def _without_changes(call: TracedCall, derivative: Wanted | None, first: Joint) -> Joint:
    refusal = first.initial[0].refusal
    try:
        second = trace_call(call, derivative)
    except TraceError as error:
        raise refusal() from error
    difference = _log_of(first).difference(_log_of(second))
    if second.initial or difference is not None:
        raise refusal()
    return second


def refuse_hidden_state(call: TracedCall, joint: Joint, blocks: Blocks | None) -> None:
    """Check that a second run of the call does the same as its trace.

    The second run makes no graph, which saves most of the time. Some code behaves differently
    without a graph. So if the logs differ, two runs of one kind are compared.

    Raises:
        TraceError: two runs of one kind differ, or the second one fails.
    """
    first = _log_of(joint)
    try:
        second = run_call(call, blocks)
        if first.difference(second) is None:
            return
        difference = second.difference(run_call(call)) or first.difference(_trace_again(call))
    except UsesGradients as why:
        raise _refusal(call, f"{_NOT_TWICE} {why}", None) from None
    except TraceError as error:
        reason = error.reason.removeprefix(f"{call.shown} cannot be traced: ")
        raise _refusal(call, f"{_NOT_TWICE} {reason}", error.loc) from error
    if difference is not None:
        words, loc = difference
        raise _refusal(call, f"run twice, it does not do the same: {words}", loc)


_NOT_TWICE = "it works at first, but not the second time:"


def _trace_again(call: TracedCall) -> OpLog:
    joint = trace_call(call)
    for change in joint.initial:
        raise change.refusal()
    return _log_of(joint)


def _log_of(joint: Joint) -> OpLog:
    """The log of a trace that this process has made."""
    assert joint.log is not None
    return joint.log


def _refusal(call: TracedCall, how: str, loc: Location | None) -> TraceError:
    return TraceError(
        f"{call.shown} cannot be traced: {how}. It depends on something that changes by itself, "
        "such as a random generator, an iterator, a counter or the time; every execution would "
        "use what it was in the trace",
        loc=loc or call.error_loc,
        remedy=_REMEDY,
    )
