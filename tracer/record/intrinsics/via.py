"""`cg.via`: choose how a value travels from the actor that made it to the actors that use it."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map

from ....ir.location import Location
from ....ir.ops import Transfer
from ...errors import TraceError
from ...source import caller_location
from ...values.specs import TensorSpec
from ...values.values import ObjectValue, TracedTensor, share
from ..session.session import Session, recording

T = TypeVar("T")

AUTO = "auto"


def via(value: T, transport: str) -> T:
    """The same value, which travels to its users by the transport of that name.

    Its gradient travels back by the same transport. A value that is used on the rank that made it
    does not travel. Outside of a step, this returns `value` itself.

    Args:
        value: a tensor or an object that an actor's method returned, or a pytree of them.
        transport: "auto" lets cg choose; "cpu" (or "mpi") is shared memory inside a machine and
            MPI between machines; "nccl", or the name of another registered communicator.

    If no communicator has the name, compiling the step raises an `IRError`.

    Returns:
        The value, or the pytree of values.

    Raises:
        TraceError: the transport is not a name, or the value is not a value of the step.
    """
    session = recording("cg.via")
    loc = caller_location(2)
    if not isinstance(transport, str) or not transport:
        raise TraceError(
            f"cg.via with the transport {transport!r}",
            loc=loc,
            remedy="name it, as in cg.via(x, 'nccl'); 'auto' leaves the choice to cg",
        )
    if session is None or transport == AUTO:
        return value
    result: T = tree_map(lambda leaf: _routed(session, leaf, transport, loc), value)
    return result


def _routed(session: Session, leaf: Any, transport: str, loc: Location | None) -> Any:
    if not isinstance(leaf, TracedTensor | ObjectValue):
        raise TraceError(
            f"cg.via of a {type(leaf).__name__}, which is not a value of the step",
            loc=loc,
            remedy="give it what actors' methods returned",
        )
    with torch._C.DisableTorchFunction():
        traced = session.use(leaf)
    spec = traced.spec
    op = Transfer(
        (traced.value,),
        (session.new_value(traced.value.name, traced.value.type),),
        via=transport,
        loc=loc,
        mb=session.mb,
    )
    session.emit(op)
    needed = isinstance(spec, TensorSpec) and spec.requires_grad and torch.is_grad_enabled()
    session.tape.record(op, None, (needed,), session.last)
    result = session.hold(op.result, spec)
    if isinstance(leaf, TracedTensor) and isinstance(result, TracedTensor):
        share(leaf, result)
    return result
