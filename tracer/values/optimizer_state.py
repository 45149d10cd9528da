"""The tensors that optimizers keep for an actor's parameters, element by element.

`RestingState` lets those of an instance rest in the memory of the host.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.lr_scheduler import LRScheduler

from ..errors import TraceError
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


PinnedMemory = Callable[[int], torch.Tensor]
"""Takes so many bytes of the host that its device can copy to and from: u8[n]."""

_ALIGNED = 256
"""Tensors begin at multiples of so many bytes, as torch's allocator has it."""


@dataclass(frozen=True, slots=True)
class _StatePlace:
    """The place of a tensor in the memory of an instance's state."""

    start: int
    like: torch.Tensor

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor in a memory, u8[n], from its beginning.

        Its storage is that part of the memory: `torch.save` writes storages as a whole, and none
        that has tensors of several types.
        """
        like = self.like
        start = memory.storage_offset() + self.start
        part = memory.untyped_storage()[start : start + like.numel() * like.element_size()]
        empty = torch.empty(0, dtype=like.dtype, device=memory.device)
        return empty.set_(part, 0, like.shape, like.stride())


class RestingState:
    """The tensors that an instance's optimizers keep, at rest in the memory of the host.

    All of it lies in one piece of pinned memory, so one copy brings it to the device and one back.
    Tensors stay the same objects: between updates their data are on the host, and while a method
    may use them on the device. A tensor that somebody has put elsewhere, such as one that a
    checkpoint has loaded, is brought back at its next use.

    Args:
        name: the actor's name.
        instance: the object whose attributes hold the optimizers.
        pinned: takes memory of the host.

    Attributes:
        optimizers: of the instance, when it was prepared last.
        size: the bytes of the memory that was prepared last.
    """

    def __init__(self, name: str, instance: object, pinned: PinnedMemory) -> None:
        self._name = name
        self._instance = instance
        self._pinned = pinned
        self.optimizers: list[torch.optim.Optimizer] = []
        self.size = 0
        self._places: dict[tuple[int, int, str], _StatePlace] = {}
        self._expected: dict[tuple[int, str], dict[torch.Tensor, dict[str, Any]]] = {}
        self._memory: torch.Tensor | None = None

    def prepare(self) -> int:
        """Find a place for each tensor, and take the memory for all.

        Tensors that the first step of an optimizer makes are known from a step on fakes.

        Returns:
            The bytes of the memory.

        Raises:
            TraceError: nobody can tell what an optimizer keeps.
        """
        state = collect(self._instance)
        self.optimizers = optimizers_of(state)
        places: dict[tuple[int, int, str], _StatePlace] = {}
        end = 0
        for optimizer in self.optimizers:
            for parameter, key, like in self._kept(optimizer):
                places[id(optimizer), id(parameter), key] = _StatePlace(end, like)
                size = like.numel() * like.element_size()
                end += -(-size // _ALIGNED) * _ALIGNED
        if self._memory is None or _outline(places) != _outline(self._places):
            self._memory = self._pinned(end)  # what lies in another goes over at its next use
        self._places, self.size = places, end
        return end

    def _kept(
        self, optimizer: torch.optim.Optimizer
    ) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
        """Each parameter with the key and the outline of what is kept for it."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        new = [p for p in parameters if p.requires_grad and not optimizer.state.get(p)]
        known = id(optimizer), settings_of(optimizer)
        fakes = self._expected.get(known, {})
        if any(parameter not in fakes for parameter in new):
            fakes = self._expected[known] = _after_step(optimizer, new, self._name)
        for parameter in parameters:  # a frozen one may have state, which another step uses
            kept = optimizer.state.get(parameter) or fakes.get(parameter, {})
            for key, value in kept.items():
                if _rests(key, value, parameter):
                    yield parameter, key, torch.empty_like(value, device="meta")

    def _held(self) -> Iterator[tuple[_StatePlace, torch.Tensor]]:
        """The tensors that are there by now, with their places."""
        for optimizer in self.optimizers:
            for parameter, kept in optimizer.state.items():
                for key, value in kept.items() if isinstance(kept, dict) else ():
                    place = self._places.get((id(optimizer), id(parameter), key))
                    if place is not None and _fits(place, value):
                        yield place, value

    def _move(self, memory: torch.Tensor) -> None:
        """Let all tensors lie in a memory; those that do not yet are copied there."""
        with torch.no_grad():
            for place, tensor in self._held():
                view = place.view(memory)
                if tensor.data_ptr() != view.data_ptr() or tensor.device != view.device:
                    view.copy_(tensor)
                    tensor.data = view

    def _lay(self, memory: torch.Tensor) -> None:
        """Let all tensors lie in a memory that has their elements."""
        for place, tensor in self._held():
            tensor.data = place.view(memory)

    def rest(self) -> tuple[torch.Tensor, ...]:
        """The memory, with the elements of all tensors that are there."""
        assert self._memory is not None, "a step that uses the state has been traced"
        self._move(self._memory)
        return (self._memory,)

    def enter(self, memory: torch.Tensor) -> tuple[None]:
        """Let all tensors lie in a copy of the memory, on the device."""
        self._lay(memory)
        return (None,)

    def leave(self, memory: torch.Tensor) -> tuple[torch.Tensor]:
        """That copy, with tensors that are new, or have been replaced."""
        self._move(memory)
        return (memory,)

    def settle(self, memory: torch.Tensor) -> tuple[None]:
        """Let all tensors rest in the memory of the host, which has been filled."""
        self._lay(memory)
        return (None,)


def _outline(places: dict[tuple[int, int, str], _StatePlace]) -> list[tuple[Any, ...]]:
    return [
        (key, place.start, place.like.shape, place.like.stride(), place.like.dtype)
        for key, place in places.items()
    ]


def _rests(key: object, value: object, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and key != _COUNT


def _fits(place: _StatePlace, value: object) -> bool:
    like = place.like
    return (
        isinstance(value, torch.Tensor)
        and (value.shape, value.dtype) == (like.shape, like.dtype)
        and value.layout is torch.strided
    )


def _after_step(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], name: str
) -> dict[torch.Tensor, dict[str, Any]]:
    """The state that an optimizer would have of parameters after a step, as fakes.

    Raises:
        TraceError: a step fails on fakes before it has made anything.
    """
    if not parameters:
        return {}
    twin: Any = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    vars(twin).pop("step", None)  # a scheduler counts the steps of its optimizer there
    twin._optimizer_step_pre_hooks = collections.OrderedDict()
    twin._optimizer_step_post_hooks = collections.OrderedDict()
    twin.state = collections.defaultdict(dict)
    fakes: dict[int, torch.Tensor] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        for parameter in parameters:
            place = parameter.shape, parameter.stride()
            fake = torch.empty_strided(*place, dtype=parameter.dtype, device=parameter.device)
            fake.requires_grad_()
            fake.grad = torch.empty_like(fake)
            fakes[id(parameter)] = fake
        groups = [
            {**group, "params": [fakes[id(p)] for p in group["params"] if id(p) in fakes]}
            for group in optimizer.param_groups
        ]
        if _step_on_fakes(twin, groups) is not None:
            _step_one_by_one(twin, groups, name)
    return {parameter: twin.state.get(fakes[id(parameter)], {}) for parameter in parameters}


def _step_on_fakes(twin: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> Exception | None:
    """Step for some groups of fake parameters; returns what a step raises.

    That is most often for a number that a fake lacks. State is made ahead of it.
    """
    twin.param_groups = groups
    try:
        type(twin).step(twin)
    except Exception as error:
        return error
    return None


def _step_one_by_one(twin: torch.optim.Optimizer, groups: list[dict[str, Any]], name: str) -> None:
    """Step for each parameter without state, since a step for all may have raised ahead of it.

    Raises:
        TraceError: a step raises before it has made anything.
    """
    for group in groups:
        for fake in group["params"]:
            if twin.state.get(fake):
                continue
            error = _step_on_fakes(twin, [{**group, "params": [fake]}])
            if error is not None and not twin.state.get(fake):
                raise TraceError(
                    f"the state of an optimizer of {name} rests on the host, and what a "
                    f"{type(twin).__qualname__} keeps is not known: a step on fake tensors "
                    f"raised {type(error).__name__}: {error}",
                    remedy="take an optimizer of torch that steps without a closure, or leave "
                    'store="host" out',
                ) from error
