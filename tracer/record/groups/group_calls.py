"""Bring the arguments of a call on a mesh into the layouts that its plan names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_unflatten

from ....ir.layout import Layout
from ....ir.location import Location
from ....ir.ops import Transfer
from ....ir.types import Mesh, Place, TensorType
from ...errors import TraceError
from ...values.group import Group, GroupActor
from ...values.mesh import describe
from ...values.specs import TensorSpec
from ...values.values import ObjectValue, Traced, TracedTensor, share
from ..session.arguments import Arguments
from ..session.session import Session


def layout_of(traced: Traced) -> Layout | None:
    """The layout of a value of the step; None if it has none."""
    type_ = traced.value.type
    return type_.layout if isinstance(type_, TensorType) else None


def moved(
    session: Session,
    tensor: TracedTensor,
    place: Place,
    layout: Layout | None,
    loc: Location | None,
) -> TracedTensor:
    """Transfer a value of the step to a place and a layout; no transfer if it is there already."""
    traced = tensor.traced
    type_, spec = traced.value.type, traced.spec
    assert isinstance(type_, TensorType)
    assert isinstance(spec, TensorSpec)
    if type_.layout == layout and (layout is None or type_.place == place):
        return tensor
    if isinstance(place, Mesh):
        session.module.meshes.setdefault(place.name, place)
    result = session.new_value(traced.value.name, replace(type_, place=place, layout=layout))
    op = session.emit(Transfer((traced.value,), (result,), loc=loc, mb=session.mb))
    needed = spec.requires_grad and torch.is_grad_enabled()
    session.tape.record(op, None, (needed,), session.last)
    moved_tensor = session.hold(op.result, replace(spec, requires_grad=needed))
    assert isinstance(moved_tensor, TracedTensor)
    return moved_tensor


def bring(
    session: Session,
    actor: GroupActor,
    method: tuple[str, Callable[..., Any]],
    arguments: Arguments,
    loc: Location | None,
) -> tuple[Arguments, tuple[Layout | None, ...]]:
    """Bring the arguments of a method into the layouts of the actor's plan.

    Args:
        session: the trace.
        actor: the actor on a mesh.
        method: the method's name, and the function of the class.
        arguments: the arguments of the call.
        loc: the user's line.

    Returns:
        The arguments, and the layouts of those that are values of the step.

    Raises:
        TraceError: the plan does not fit an argument, or does not name one that is laid out.
    """
    session.module.meshes.setdefault(actor.mesh.name, actor.mesh)
    session.groups[actor.name] = actor
    name, function = method
    names = _names(function, arguments)
    leaves = list(arguments.leaves)
    layouts: list[Layout | None] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, ObjectValue):
            layouts.append(None)
        elif isinstance(leaf, TracedTensor):
            layout = _wanted(actor, name, names.get(index), leaf, loc)
            leaves[index] = _passed(session, leaf, actor.mesh, layout, loc)
            layouts.append(layout)
    operands = [leaf.traced for leaf in leaves if isinstance(leaf, TracedTensor | ObjectValue)]
    return replace(arguments, operands=operands, leaves=leaves), tuple(layouts)


def gather(session: Session, place: Place, arguments: Arguments, loc: Location | None) -> Arguments:
    """Gather the arguments of a method of an actor on one rank, which takes whole tensors."""
    leaves = [
        _passed(session, leaf, place, None, loc) if isinstance(leaf, TracedTensor) else leaf
        for leaf in arguments.leaves
    ]
    operands = [leaf.traced for leaf in leaves if isinstance(leaf, TracedTensor | ObjectValue)]
    return replace(arguments, operands=operands, leaves=leaves)


def _passed(
    session: Session,
    tensor: TracedTensor,
    place: Place,
    layout: Layout | None,
    loc: Location | None,
) -> TracedTensor:
    """A value at the place and in the layout that a method takes.

    It shares storage with the value, as in plain Python the method gets the value itself.
    """
    moved_tensor = moved(session, tensor, place, layout, loc)
    if moved_tensor is not tensor:
        share(tensor, moved_tensor)
    return moved_tensor


def _wanted(
    actor: GroupActor, method: str, name: str | None, tensor: TracedTensor, loc: Location | None
) -> Layout | None:
    """The layout that the plan gives an argument.

    Raises:
        TraceError: the layout does not fit, or the plan does not name a laid-out argument.
    """
    argument = f"{method}({name})"
    sharding = None if name is None else actor.plan.of_argument(method, name)
    have = layout_of(tensor.traced)
    if sharding is None:
        if have is None:
            return None
        raise TraceError(
            f"{actor.name}.{method} takes %{tensor.traced.value.name}, {tensor.traced.value.type}, "
            f"and the actor's plan does not say how {argument} is laid out",
            loc=loc,
            remedy=f'name it in the plan of {actor.name}: "{argument}": cg.cut(0, '
            f'"{actor.mesh.grid[0][0]}"), say, or cg.whole for a copy on each rank',
        )
    spec = tensor.traced.spec
    assert isinstance(spec, TensorSpec)
    try:
        return sharding.layout(actor.mesh, spec.shape, f"{actor.name}.{argument}")
    except ValueError as error:
        raise TraceError(
            f"{error}",
            loc=loc,
            remedy=f'change "{argument}" in the plan of {actor.name}, or give it a tensor '
            "that fits",
        ) from None


def _names(function: Callable[..., Any], arguments: Arguments) -> dict[int, str]:
    """The argument's name for each leaf, by index; empty if the arguments do not fit."""
    numbers = list(range(len(arguments.leaves)))
    args, kwargs = tree_unflatten(numbers, arguments.spec)
    try:
        bound = inspect.signature(function).bind(None, *args, **kwargs)
    except TypeError:
        return {}  # tracing the method raises a better error
    pairs = list(bound.arguments.items())[1:]
    return {index: name for name, value in pairs for index in tree_leaves(value)}


def group_of(
    session: Session, operands: Iterable[Traced], shown: str, loc: Location | None
) -> Group | None:
    """The group of ranks that compute a torch function together; None without laid-out operands.

    Raises:
        TraceError: the laid-out operands are on different ranks.
    """
    values = list(operands)
    laid_out = [value for value in values if layout_of(value) is not None]
    if not laid_out:
        return None
    place = laid_out[0].place
    for traced in laid_out[1:]:
        if traced.place != place:
            raise TraceError(
                f"{shown} takes %{laid_out[0].value.name} of {_shown(place)} and "
                f"%{traced.value.name} of {_shown(traced.place)}",
                loc=loc,
                remedy="pass one of them through a method of an actor on the other one's mesh",
            )
    played = tuple(rank for rank in place.ranks if session.peers.plays(rank))
    return Group(place, tuple(map(layout_of, values)), played)


def _shown(place: Place) -> str:
    return describe(place) if isinstance(place, Mesh) else f"ranks {place}"
