"""The tensors that optimizers keep for an actor's parameters, element by element."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import LRScheduler

from .actor_state import ActorState, StateTensor, collect

_COUNT = "step"
"""Torch's key for the number of steps, which an optimizer does not keep element by element."""


@dataclass(frozen=True)
class OptimizerTensor:
    """A tensor that an optimizer keeps for a parameter, and that has its shape.

    Attributes:
        optimizer: the optimizer.
        parameter: the parameter.
        tensor: the tensor that is kept.
    """

    optimizer: torch.optim.Optimizer
    parameter: StateTensor
    tensor: torch.Tensor


def kept_by_optimizers(state: ActorState) -> Iterator[OptimizerTensor]:
    """The tensors of parameters' shapes that an actor's optimizers keep for them."""
    for optimizer in optimizers_of(state):
        for parameter in state.tensors:
            for key, value in optimizer.state.get(parameter.tensor, {}).items():
                is_alike = isinstance(value, torch.Tensor) and value.shape == parameter.tensor.shape
                if is_alike and key != _COUNT:
                    yield OptimizerTensor(optimizer, parameter, value)


def optimizers_of(state: ActorState) -> list[torch.optim.Optimizer]:
    """The optimizers of an actor, and those of its schedulers."""
    optimizers: dict[int, torch.optim.Optimizer] = {}
    for trainer in state.trainers:
        optimizer = trainer.optimizer if isinstance(trainer, LRScheduler) else trainer
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizers[id(optimizer)] = optimizer
    return list(optimizers.values())


def settings_of(trainer: object) -> str:
    """The plain values of an optimizer or a scheduler in words, such as its rates.

    Left out are values without equality in another process, such as functions.
    """
    groups = trainer.param_groups if isinstance(trainer, torch.optim.Optimizer) else [vars(trainer)]
    words = [
        ", ".join(f"{name}={_plain(group[name])!r}" for name in group if _is_plain(group[name]))
        for group in groups
    ]
    return f"{type(trainer).__name__}({'; '.join(words)})"


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value)) and not any(isinstance(v, torch.Tensor) for v in value)
    if isinstance(value, torch.Tensor):
        return value.device.type != "meta"
    return value is None or isinstance(value, bool | int | float | str)


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def move(instance: object, device: torch.device) -> None:
    """Move the tensors of an actor to a device, with those that its optimizers keep.

    The tensors stay the same objects: an optimizer knows a parameter by its identity.
    """
    state = collect(instance)
    optimizer_tensors = [entry.tensor for entry in kept_by_optimizers(state)]
    for tensor in (*(state_tensor.tensor for state_tensor in state.tensors), *optimizer_tensors):
        tensor.data = tensor.data.to(device)
