"""The pieces of actors' tensors, and of their optimizers' state, on the ranks of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

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
    """The tensors that an actor's optimizers keep: `name.key` for the parameter of that name."""
    group = actor._member.group
    for rank, each in _tensors(actor):
        name = name_of(each)
        if name is None:
            continue
        shape, region = held(each, group, rank)
        for optimizer in optimizers(actor.instances[rank]):
            for key, value in optimizer.state.get(each.tensor, {}).items():
                if not isinstance(value, torch.Tensor):
                    continue
                same = value.shape == each.tensor.shape
                like = (shape, region) if same else (tuple(value.shape), whole(tuple(value.shape)))
                counts = _counts(group, each.path if same else None, rank)
                yield Piece(f"{name}.{key}", value, *like, counts)


def optimizers(instance: object) -> list[torch.optim.Optimizer]:
    """The optimizers of an actor, in the order in which its attributes reach them."""
    found = collect(instance).trainers
    return [each for each in found if isinstance(each, torch.optim.Optimizer)]


def trains(optimizer: torch.optim.Optimizer, tensor: torch.Tensor) -> bool:
    """Whether an optimizer has a tensor among its parameters."""
    return any(p is tensor for group in optimizer.param_groups for p in group["params"])


def held(state: StateTensor, group: GroupActor | None, rank: int) -> tuple[tuple[int, ...], Region]:
    """The shape of the logical tensor, and the part of it that a rank holds."""
    logical = None if group is None else group.logical.get(state.path)
    if group is None or logical is None or logical.layout is None:
        shape = tuple(state.tensor.shape)
        return shape, whole(shape)
    return logical.shape, logical.layout.region(logical.shape, group.mesh.position(rank))


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
