"""The tensors that optimizers keep for an actor's parameters, element by element.

`RestingState` lets those of an instance rest in the memory of the host, with its parameters.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.lr_scheduler import LRScheduler

from ..errors import TraceError
from .actor_state import ActorState, StateTensor, collect
from .heap.pinned_piece import Key, PinnedMemory, PinnedPiece, PinnedPlace
from .operators import storage_key

_COUNT = "step"
"""Torch's key for the number of steps, which an optimizer does not keep element by element."""

_COUNTS = frozenset({_COUNT, "mu_product"})
"""Torch's keys for numbers that an optimizer reads at every step; the second is NAdam's."""


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


class StepCounts:
    """The numbers of steps of optimizers, which belong on the host.

    An optimizer reads them at every step, and would wait for the device. Torch before 2.13 makes
    them on its default device, which is the actor's while an opaque method runs. Those of a
    `fused` or `capturable` optimizer belong on the device.

    Args:
        optimizers: of an actor.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._known = 0

    def bring_to_host(self) -> None:
        """Bring those that are new to the host, which waits for the device then."""
        known = sum(len(optimizer.state) for optimizer in self._optimizers)
        if known == self._known:
            return
        self._known = known
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if group.get("capturable") or group.get("fused"):
                    continue
                for parameter in group["params"]:
                    kept = optimizer.state.get(parameter, {})
                    for key in _COUNTS & kept.keys():
                        if isinstance(kept[key], torch.Tensor):
                            kept[key] = kept[key].cpu()


def settings_of(trainer: object) -> str:
    """The plain values of an optimizer or a scheduler in words, such as its rates.

    Left out are values without equality in another process, such as functions.
    """
    groups = trainer.param_groups if isinstance(trainer, torch.optim.Optimizer) else [vars(trainer)]
    words = [
        ", ".join(
            f"{name}={_plain(value)!r}"
            for name, value in group.items()
            if name != "params" and _is_plain(value)
        )
        for group in groups
    ]
    return f"{type(trainer).__name__}({'; '.join(words)})"


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, torch.Tensor):
        return value.device.type != "meta"
    return value is None or isinstance(value, bool | int | float | str)


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value.tolist() if isinstance(value, torch.Tensor) else value


def move(instance: object, device: torch.device, rests: bool = False) -> None:
    """Move the tensors of an actor to a device, with those that its optimizers keep.

    The tensors stay the same objects: an optimizer knows a parameter by its identity.

    Args:
        instance: the actor.
        device: the device.
        rests: whether its parameters stay where they are, since they rest on the host.
    """
    state = collect(instance)
    optimizer_tensors = [entry.tensor for entry in kept_by_optimizers(state)]
    stay = {id(resting.tensor) for resting in (resting_parameters(state) if rests else ())}
    for tensor in (*(state_tensor.tensor for state_tensor in state.tensors), *optimizer_tensors):
        if id(tensor) not in stay:
            tensor.data = tensor.data.to(device)


def resting_parameters(state: ActorState) -> list[StateTensor]:
    """The parameters of an actor that may rest on the host: contiguous, in memory of their own."""
    memory = collections.Counter(storage_key(tensor.tensor) for tensor in state.tensors)
    return [
        state_tensor
        for state_tensor in state.tensors
        if type(tensor := state_tensor.tensor) is torch.nn.Parameter
        and memory[storage_key(tensor)] == 1
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
    ]


class RestingState:
    """The parameters of an instance, and what its optimizers keep, at rest in the host's memory.

    All that an update may change lies in one piece of pinned memory, so one copy brings it to the
    device and one back. Frozen parameters lie in another, which is only read. Tensors stay the same
    objects: between updates their data are on the host, and while an opaque method runs, those of
    the first piece are on the device. Gradients are on the device at all times. A tensor that
    somebody has put elsewhere, such as one that a checkpoint has loaded, is brought back at its
    next use.

    Args:
        name: the actor's name.
        instance: the object whose attributes hold the parameters and optimizers.
        pinned: takes memory of the host.
        device: the device where the tensors are used.
        has_parameters: whether parameters rest as well; else only what optimizers keep.
        largest: for parameters of which ranks hold pieces, the elements of the largest piece, by
            path. Each rank leaves as much room, so that all have equal types.

    Attributes:
        device: as above.
        optimizers: of the instance, when it was prepared last.
        paths: the parameters that rest, by path, when it was prepared last.
    """

    def __init__(
        self,
        name: str,
        instance: object,
        pinned: PinnedMemory,
        device: torch.device,
        has_parameters: bool,
        largest: Mapping[str, int],
    ) -> None:
        self.device = device
        self.optimizers: list[torch.optim.Optimizer] = []
        self.paths: dict[str, torch.Tensor] = {}
        self._name = name
        self._instance = instance
        self._has_parameters = has_parameters
        self._largest = largest
        self._moving = PinnedPiece(pinned)
        self._frozen = PinnedPiece(pinned)
        self._expected: dict[tuple[int, str], dict[torch.Tensor, dict[str, Any]]] = {}

    @property
    def size(self) -> int:
        """The bytes that an opaque method finds on the device."""
        return self._moving.size

    def current_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that the instance has now."""
        return optimizers_of(collect(self._instance))

    def current_parameters(self) -> dict[str, torch.Tensor]:
        """The parameters that the instance has now and that rest, by path."""
        if not self._has_parameters:
            return {}
        tensors = resting_parameters(collect(self._instance))
        return {tensor.path: tensor.tensor for tensor in tensors}

    def prepare(self) -> int:
        """Find a place for each tensor, take the memory for all, and let parameters rest there.

        Tensors that the first step of an optimizer makes are known from a step on fakes.

        Returns:
            The bytes that an opaque method finds on the device.

        Raises:
            TraceError: nobody can tell what an optimizer keeps.
        """
        state = collect(self._instance)
        self.optimizers = self.current_optimizers()
        self.paths = self.current_parameters()
        room = {id(tensor.tensor): self._largest.get(tensor.path, 0) for tensor in state.tensors}
        moving: list[tuple[Key, torch.Tensor, int]] = []
        frozen: list[tuple[Key, torch.Tensor, int]] = []
        for tensor in self.paths.values():
            like = torch.empty_like(tensor, device="meta", requires_grad=False)
            numel = max(like.numel(), room[id(tensor)])
            (moving if tensor.requires_grad else frozen).append(((0, id(tensor), ""), like, numel))
        for optimizer in self.optimizers:
            for parameter, key, like in self._kept(optimizer):
                numel = max(like.numel(), room.get(id(parameter), 0))
                moving.append(((id(optimizer), id(parameter), key), like, numel))
        self._moving.lay_out(moving)
        self._frozen.lay_out(frozen)
        self.come_to_rest()
        return self.size

    def come_to_rest(self) -> None:
        """Bring parameters to their places that are elsewhere, as behind a method that failed.

        Where some have been frozen, or are no longer, all get new places.
        """
        moving = self._moving.places
        if any(t.requires_grad != ((0, id(t), "") in moving) for t in self.paths.values()):
            self.prepare()
        for tensor in self.paths.values():
            self._rest(tensor)

    def _rest(self, tensor: torch.Tensor) -> torch.Tensor:
        """Bring a parameter to its place, and return all that the place has room for."""
        key = (0, id(tensor), "")
        piece = self._moving if key in self._moving.places else self._frozen
        place = piece.places[key]
        flat = place.flat(piece.memory)
        if tensor.data_ptr() != flat.data_ptr() and place.fits(tensor):
            with torch.no_grad():
                view = place.view(piece.memory)
                view.copy_(tensor)
                tensor.data = view
        return flat

    def flat(self, path: str) -> torch.Tensor:
        """The memory of a parameter at rest, in one dimension, with room for the largest piece."""
        return self._rest(self.paths[path])

    def _kept(
        self, optimizer: torch.optim.Optimizer
    ) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
        """Each parameter with the key and the outline of what is kept for it."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        new = [p for p in parameters if p.requires_grad and not optimizer.state.get(p)]
        known = id(optimizer), settings_of(optimizer)
        fakes = self._expected.get(known, {})
        if any(parameter not in fakes for parameter in new):
            fakes = self._expected[known] = _after_step(optimizer, new, self._name, self.device)
        for parameter in parameters:  # a frozen one may have state, which another step uses
            kept = optimizer.state.get(parameter) or fakes.get(parameter, {})
            for key, value in kept.items():
                if _rests(key, value, parameter):
                    yield parameter, key, torch.empty_like(value, device="meta")

    def _held(self) -> Iterator[tuple[PinnedPlace, torch.Tensor]]:
        """The tensors of the piece that moves which are there by now, with their places."""
        places = self._moving.places
        for parameter in self.paths.values():
            place = places.get((0, id(parameter), ""))
            if place is not None and place.fits(parameter):
                yield place, parameter
        for optimizer in self.optimizers:
            for parameter, kept in optimizer.state.items():
                for key, value in kept.items() if isinstance(kept, dict) else ():
                    place = places.get((id(optimizer), id(parameter), key))
                    if place is not None and place.fits(value):
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
        self._move(self._moving.memory)
        return (self._moving.memory,)

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


def _rests(key: object, value: object, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and key != _COUNT


def _after_step(
    optimizer: torch.optim.Optimizer,
    parameters: list[torch.Tensor],
    name: str,
    device: torch.device,
) -> dict[torch.Tensor, dict[str, Any]]:
    """The state that an optimizer would have of parameters after a step on a device, as fakes.

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
            fake = torch.empty_strided(*place, dtype=parameter.dtype, device=device)
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
