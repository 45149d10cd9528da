"""`cg.layout`: give a value another layout, in a step or in a method of an actor on a mesh."""

from __future__ import annotations

import torch

from ....ir.types import Mesh
from ...errors import TraceError
from ...graph.layouts.asked import asked_layout, text_of_cuts
from ...source import caller_location
from ...values.plan import Sharding
from ...values.values import TracedTensor
from ..groups.group_calls import moved
from ..session.session import recording


def layout(value: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """The same tensor in another layout; the ranks of its mesh exchange the pieces.

    Use it for exchanges that cg does not make by itself, such as to gather a tensor that is cut.
    In one process, and in methods of actors on single ranks, the result is a copy of the tensor.

    Args:
        value: a tensor inside of a method; or a value of the step that is on a mesh.
        sharding: `cg.cut(...)`, several cuts joined by `&`, or `cg.whole`.

    Returns:
        The tensor in the layout, with the shape and dtype of `value`.

    Raises:
        TypeError: `sharding` is not a sharding.
        TraceError: the value is not on a mesh, or the layout does not fit it.
    """
    if not isinstance(sharding, Sharding):
        raise TypeError(f"cg.layout takes cg.cut(...) or cg.whole, not {sharding!r}")
    if not isinstance(value, TracedTensor):
        tensor: torch.Tensor = asked_layout(value, text_of_cuts(sharding.cuts))
        return tensor
    session, loc = recording("cg.layout"), caller_location(2)
    assert session is not None, "values of a step are met in it"
    with torch._C.DisableTorchFunction():
        traced = session.use(value)
    place, name = traced.value.type.place, f"%{traced.value.name}"
    if not isinstance(place, Mesh):
        raise TraceError(
            f"cg.layout of {name}, {traced.value.type}, whose place is no mesh",
            loc=loc,
            remedy="give it what a method of an actor on a mesh has returned",
        )
    try:
        target_layout = sharding.layout(place, tuple(value.shape), name)
    except ValueError as error:
        remedy = "correct what cg.layout is given there"
        raise TraceError(str(error), loc=loc, remedy=remedy) from None
    return moved(session, value, place, target_layout, loc)
