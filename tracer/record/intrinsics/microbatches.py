"""Cut the inputs of a step into microbatches, and average over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

from ....ir.location import Location
from ....ir.ops import View
from ....ir.types import TensorType
from ...errors import TraceError
from ...source import caller_location
from ...values.specs import TensorSpec
from ...values.values import ObjectValue, TracedTensor, share
from ..session.session import Session, recording

T = TypeVar("T")


def microbatches(tree: T, n: int) -> Iterator[T]:
    """Iterate over `n` equal parts of a pytree of tensors, cut along dimension 0.

    The parts are views. In a traced step, the ops that the body of the loop records belong to its
    microbatch; pipeline schedules order the work by microbatches.

    Args:
        tree: a tensor, or a pytree of tensors, whose dimension 0 has one length, a multiple of
            `n`. A leaf that is None is None in every part.
        n: the number of parts.

    Returns:
        The parts: pytrees like `tree`.

    Raises:
        TraceError: `tree` cannot be cut in this way, or the loop is inside another such loop.
    """
    session = recording("cg.microbatches")
    loc = caller_location(2)
    leaves, spec = tree_flatten(tree)
    length = _length(tree, n, loc)
    if session is None:
        return cast("Iterator[T]", _eager(leaves, spec, n, length // n))
    if session.mb is not None:
        raise TraceError(
            "cg.microbatches inside a loop over other microbatches",
            loc=loc,
            remedy="cut everything at once: for x, y in cg.microbatches((x, y), n)",
        )
    return cast("Iterator[T]", _traced(session, leaves, spec, n, length // n, loc))


def mean(values: Iterable[torch.Tensor]) -> torch.Tensor:
    """The mean over all elements of tensors of one shape: `torch.stack(values).mean()`.

    Args:
        values: floating-point tensors of one shape, on any ranks.

    Returns:
        A tensor of shape (), of their dtype.

    Raises:
        ValueError: there are no values.
        TraceError: a value is an object that is known only when the step runs.
        TypeError: a value is anything else that is not a tensor.
    """
    tensors = tuple(values)
    if not tensors:
        raise ValueError("cg.mean of no values; give it at least one tensor")
    for value in tensors:
        if isinstance(value, ObjectValue):
            value.refuse_as_tensor("cg.mean of")
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"cg.mean takes tensors, not {value!r}; a number is torch.tensor(x)")
    return torch.stack(tensors).mean()


def _length(tree: Any, n: int, loc: Location | None) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise TraceError(
            f"cg.microbatches into {n!r} parts", loc=loc, remedy="give a positive integer"
        )
    first: tuple[str, int] | None = None
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if leaf is None:
            continue
        name = keystr(path) or "the tensor"
        if not isinstance(leaf, torch.Tensor):
            raise TraceError(
                f"cg.microbatches cuts tensors, {name} is {type(leaf).__name__}",
                loc=loc,
                remedy="give it tensors only; what all microbatches share needs no cutting",
            )
        if leaf.dim() == 0:
            raise TraceError(
                f"cg.microbatches cuts along dimension 0, {name} has no dimension",
                loc=loc,
                remedy="give it tensors only whose dimension 0 is the batch",
            )
        size = int(leaf.shape[0])
        if first is None:
            first = (name, size)
        elif first[1] != size:
            raise TraceError(
                f"cg.microbatches: dimension 0 is {first[1]} in {first[0]}, but {size} in {name}",
                loc=loc,
                remedy="all tensors must have the batch as dimension 0",
            )
    if first is None:
        raise TraceError("cg.microbatches of no tensor", loc=loc, remedy="give it a tensor")
    if first[1] % n:
        raise TraceError(
            f"cg.microbatches cuts a batch of {first[1]} into {n} equal parts, which does not "
            "come out even",
            loc=loc,
            remedy=f"choose a batch size that is a multiple of {n}, or another n",
        )
    return first[1]


def _eager(leaves: list[Any], spec: TreeSpec, n: int, length: int) -> Iterator[Any]:
    for i in range(n):
        parts = [None if x is None else x.narrow(0, i * length, length) for x in leaves]
        yield tree_unflatten(parts, spec)


def _traced(
    session: Session, leaves: list[Any], spec: TreeSpec, n: int, length: int, loc: Location | None
) -> Iterator[Any]:
    try:
        for i in range(n):
            session.mb = i
            parts = [_part(session, leaf, i * length, length, loc) for leaf in leaves]
            yield tree_unflatten(parts, spec)
    finally:
        session.mb = None


def _part(session: Session, leaf: Any, start: int, length: int, loc: Location | None) -> Any:
    if leaf is None:
        return None
    if not isinstance(leaf, TracedTensor):
        raise TraceError(
            "cg.microbatches of a real tensor, which is not a value of the step",
            loc=loc,
            remedy="pass it to the step as an argument",
        )
    with torch._C.DisableTorchFunction():
        traced = session.use(leaf)
    spec, type_ = traced.spec, traced.value.type
    assert isinstance(spec, TensorSpec)
    assert isinstance(type_, TensorType)
    if spec.requires_grad:
        return leaf.narrow(0, start, length)  # gradients do not flow through a `View` op
    shape = (length, *spec.shape[1:])
    value = session.new_value(traced.value.name, TensorType(type_.dtype, shape, type_.place))
    session.emit(
        View((traced.value,), (value,), dim=0, start=start, length=length, loc=loc, mb=session.mb)
    )
    part = session.hold(value, TensorSpec(spec.dtype, shape))
    assert isinstance(part, TracedTensor)
    share(leaf, part)
    return part
