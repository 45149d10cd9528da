"""The pieces of actors' tensors, and of their optimizers' state, on the ranks of this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ...backends.devices.programs.tail import follow_tails
from ...ir.layout import Region, whole
from ...tracer.record.actors.actors import ActorHandle
from ...tracer.values.actor_state import StateTensor, collect
from ...tracer.values.group import GroupActor
from ...tracer.values.optimizer_state import optimizers_of
from ..world.world import world

NameOf: TypeAlias = Callable[[StateTensor], str | None]
"""The name of a tensor of an actor's state in a file; None if it is not there."""

_REMEDY = (
    "keep it in a tensor that is state of a parameter, or among the options of the optimizer's "
    "groups, which belong in state.json"
)


@dataclass(frozen=True)
class SavedPiece:
    """A rank's piece of a logical tensor; `counts` tells whether this rank writes it."""

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    region: Region
    counts: bool


def pieces(actor: ActorHandle, name_of: NameOf) -> Iterator[SavedPiece]:
    """The tensors of an actor's state."""
    for rank, state in _tensors(actor):
        name = name_of(state)
        if name is not None:
            group = actor._member.group
            shape, region = held(state, group, rank)
            yield SavedPiece(name, state.tensor, shape, region, _counts(group, state.path, rank))


def has_optimizers(actor: ActorHandle) -> bool:
    """Whether an actor has an optimizer on a rank of this process."""
    return any(optimizers_of(collect(instance)) for instance in actor.instances.values())


def optimizer_pieces(actor: ActorHandle, name_of: NameOf) -> Iterator[SavedPiece]:
    """The tensors that an actor's optimizers keep: `name.key` for the parameter of that name.

    Raises:
        ValueError: one is neither cut as its parameter nor the same for all pieces. Or an optimizer
            keeps state that has no name in a file: it is no tensor, belongs to no parameter, or
            another optimizer keeps state for the parameter as well.
    """
    group = actor._member.group
    tensors = list(_tensors(actor))  # which waits for devices
    optimizers = {
        rank: optimizers_of(collect(instance)) for rank, instance in actor.instances.items()
    }
    for rank_optimizers in optimizers.values():
        _refuse_others(rank_optimizers, actor.name)
    for rank, state in tensors:
        name = name_of(state)
        if name is None:
            continue
        logical, region = held(state, group, rank)
        for key, value in _kept_for(state, optimizers[rank], actor.name):
            same = value.shape == state.tensor.shape
            shape = logical if same else tuple(value.shape)
            part = region if same else region_like(f"{name}.{key}", shape, state, group, rank)
            counts = _counts(group, state.path if same else None, rank)
            yield SavedPiece(f"{name}.{key}", value, shape, part, counts)


def _kept_for(
    parameter: StateTensor, optimizers: Iterable[torch.optim.Optimizer], actor: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that an optimizer keeps for a parameter, by key.

    Raises:
        ValueError: it has no name in a file.
    """
    keeping = [optimizer for optimizer in optimizers if _keeps(optimizer, parameter.tensor)]
    if len(keeping) > 1:
        raise ValueError(
            f"{_names(keeping)} of {actor} both keep state for '{parameter.path}', and a file has "
            "one place for it; train each parameter by one optimizer"
        )
    for optimizer in keeping:
        for key, value in optimizer.state[parameter.tensor].items():
            subject = f"{_names([optimizer])} of {actor} keeps {key!r} for '{parameter.path}'"
            if value is None:
                continue
            if not isinstance(value, torch.Tensor):
                raise ValueError(
                    f"{subject}, which is no tensor but a value of type {type(value).__name__}, so "
                    f"it would be missing in the file; {_REMEDY}"
                )
            if not isinstance(key, str) or "." in key:
                raise ValueError(f"{subject}; call it by a word without a dot")
            yield key, value


def _refuse_others(optimizers: Iterable[torch.optim.Optimizer], actor: str) -> None:
    """Refuse optimizers with state of what they do not train: it has no name in a file."""
    for optimizer in optimizers:
        parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for key, value in optimizer.state.items():
            is_empty = isinstance(value, dict) and not value  # as asking for it makes it
            if id(key) not in parameters and not is_empty:
                word = f"a {type(key).__name__}" if isinstance(key, torch.Tensor) else repr(key)
                raise ValueError(
                    f"{_names([optimizer])} of {actor} keeps state for {word}, which is none of "
                    f"its parameters, so it would be missing in the file; {_REMEDY}"
                )


def _keeps(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    return any(value is not None for value in optimizer.state.get(parameter, {}).values())


def _names(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    return " and ".join(type(optimizer).__name__ for optimizer in optimizers)


def group_with(optimizer: torch.optim.Optimizer, tensor: torch.Tensor) -> dict[str, Any] | None:
    """The group of an optimizer's parameters that a tensor is in; None if it does not train it."""
    groups = (g for g in optimizer.param_groups if any(p is tensor for p in g["params"]))
    return next(groups, None)


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
        for state in collect(instance).tensors:
            yield rank, state


def _counts(group: GroupActor | None, path: str | None, rank: int) -> bool:
    """True if the rank is the first of those that hold copies of a piece."""
    if group is None:
        return True
    logical = group.logical.get(path) if path is not None else None
    cutting = () if logical is None or logical.layout is None else logical.layout.axes
    position = group.mesh.position(rank)
    return all(position[axis][0] == 0 for axis, _ in group.mesh.grid if axis not in cutting)
