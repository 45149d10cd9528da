"""The pieces of actors' tensors, and of their optimizers' state, on the ranks of this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ...backends.devices.programs.tail import follow_tails
from ...ir.layout import Region, whole
from ...tracer.actors.actor_state import StateTensor, collect
from ...tracer.actors.actors import ActorHandle
from ...tracer.groups.group import GroupActor
from ..world.world import world

NameOf: TypeAlias = Callable[[StateTensor], str | None]
"""The name of a tensor of an actor's state in a file; None if it is not there."""


@dataclass(frozen=True)
class Piece:
    """A rank's piece of a logical tensor, and whether it is the one that writes it."""

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    region: Region
    counts: bool


def pieces(actor: ActorHandle, name_of: NameOf) -> Iterator[Piece]:
    """The tensors of an actor's state."""
    for rank, each in _tensors(actor):
        name = name_of(each)
        if name is not None:
            group = actor._member.group
            shape, region = held(each, group, rank)
            yield Piece(name, each.tensor, shape, region, _counts(group, each.path, rank))


def optimizer_pieces(actor: ActorHandle, name_of: NameOf) -> Iterator[Piece]:
    """The tensors that an actor's optimizers keep: `name.key` for the parameter of that name.

    Raises:
        ValueError: one is neither cut as its parameter nor the same for all pieces.
    """
    group = actor._member.group
    for rank, each in _tensors(actor):
        name = name_of(each)
        if name is None:
            continue
        logical, region = held(each, group, rank)
        for optimizer in optimizers(actor.instances[rank]):
            for key, value in optimizer.state.get(each.tensor, {}).items():
                if not isinstance(value, torch.Tensor):
                    continue
                same = value.shape == each.tensor.shape
                shape = logical if same else tuple(value.shape)
                part = region if same else region_like(f"{name}.{key}", shape, each, group, rank)
                counts = _counts(group, each.path if same else None, rank)
                yield Piece(f"{name}.{key}", value, shape, part, counts)


def optimizers(instance: object) -> list[torch.optim.Optimizer]:
    """The optimizers of an actor, in the order in which its attributes reach them."""
    found = collect(instance).trainers
    return [each for each in found if isinstance(each, torch.optim.Optimizer)]


def group_with(optimizer: torch.optim.Optimizer, tensor: torch.Tensor) -> dict[str, Any] | None:
    """The group of an optimizer's parameters that a tensor is in; None if it does not train it."""
    found = (g for g in optimizer.param_groups if any(p is tensor for p in g["params"]))
    return next(found, None)


def held(state: StateTensor, group: GroupActor | None, rank: int) -> tuple[tuple[int, ...], Region]:
    """The shape of the logical tensor, and the part of it that a rank holds."""
    logical = None if group is None else group.logical.get(state.path)
    if group is None or logical is None or logical.layout is None:
        shape = tuple(state.tensor.shape)
        return shape, whole(shape)
    return logical.shape, logical.layout.region(logical.shape, group.mesh.position(rank))


def region_like(
    name: str, shape: tuple[int, ...], state: StateTensor, group: GroupActor | None, rank: int
) -> Region:
    """The part that a rank holds of a tensor that an optimizer keeps for a parameter.

    It is the parameter's part where the tensor has the parameter's shape, and the whole of others.

    Args:
        name: of the tensor, for messages.
        shape: of the logical tensor.
        state: the parameter.

    Raises:
        ValueError: ranks hold pieces of the parameter, and the tensor has another shape and several
            elements.
    """
    logical, region = held(state, group, rank)
    if shape == logical:
        return region
    if tuple(state.tensor.shape) != logical and math.prod(shape) != 1:
        raise ValueError(
            f"'{name}' is {list(shape)}, and cannot be cut as its parameter of {list(logical)}, of "
            "which ranks hold pieces; leave the parameter whole on the mesh, or take an optimizer "
            "that works element by element"
        )
    return whole(shape)


def _tensors(actor: ActorHandle) -> Iterator[tuple[int, StateTensor]]:
    device = world().device
    if device is not None:  # whose results nobody may have taken
        follow_tails(device, (device.caller(),))
    for rank, instance in actor.instances.items():
        for each in collect(instance).tensors:
            yield rank, each


def _counts(group: GroupActor | None, path: str | None, rank: int) -> bool:
    """True if the rank is the first of those that hold copies of a piece."""
    if group is None:
        return True
    logical = group.logical.get(path) if path is not None else None
    cutting = () if logical is None or logical.layout is None else logical.layout.axes
    position = group.mesh.position(rank)
    return all(position[axis][0] == 0 for axis, _ in group.mesh.grid if axis not in cutting)
