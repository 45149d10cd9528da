"""Find the state of an actor: every tensor that its attributes reach, and what holds each.

An actor is a `torch.nn.Module` or any other object. Its state is found by walking attributes,
modules, lists, dicts, tuples and plain objects, and what bound methods and partial functions hold,
whose tensors are none of the actor's. The holder of a tensor is remembered as a
`StateAttribute`, so that tracing can put a fake in its place and a body can look the live tensor up
again.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from ..errors import TraceError
from .heap.kinds import (
    BOUND,
    SCALARS,
    TRAINERS,
    has_slots,
    held_by,
    is_of_model,
    is_stateful,
    is_walked,
    items_of,
    join,
    slots_of,
)

_MANY = 10_000
"""A container with more items is not walked."""


@dataclass(frozen=True, eq=False, slots=True)
class StateAttribute:
    """The attribute that a tensor of the actor's state hangs on.

    Attributes:
        holder: the dict or list that holds it: a module's `_parameters`, an object's `__dict__`.
        key: its key or index there.
        within: indices on the way in, where the holder holds a (nested) tuple.
        path: in words, from the actor: `blocks.0.weight`.
    """

    holder: Any
    key: Any
    within: tuple[int, ...]
    path: str

    def get(self) -> Any:
        """Return what is there now.

        Raises:
            LookupError: nothing is there.
        """
        value = self.holder[self.key]
        for index in self.within:
            value = value[index]
        return value

    def put(self, value: Any) -> None:
        """Put `value` there."""
        old = self.holder[self.key] if self.within else None
        self.holder[self.key] = _replaced(old, self.within, value)


def _replaced(old: Any, within: tuple[int, ...], value: Any) -> Any:
    if not within:
        return value
    items = list(old)
    items[within[0]] = _replaced(items[within[0]], within[1:], value)
    return type(old)(*items) if hasattr(old, "_fields") else type(old)(items)


@dataclass(eq=False, slots=True)
class StateTensor:
    """One tensor of the state with all the slots that hold it (several: a tied tensor).

    Attributes:
        whole: the shape of the logical tensor, where `tensor` is a piece of one.
        sources: where it is no tensor of the state, but is computed from some, these.
        used_on: the device where it is used, if it rests on another.
    """

    tensor: torch.Tensor
    slots: list[StateAttribute]
    whole: tuple[int, ...] | None = None
    sources: tuple[StateTensor, ...] = ()
    used_on: torch.device | None = None

    @property
    def device(self) -> torch.device:
        """The device where it is used."""
        return self.tensor.device if self.used_on is None else self.used_on

    @property
    def held(self) -> tuple[StateTensor, ...]:
        """The tensors of the state that are read for it: itself, or its sources."""
        return self.sources or (self,)

    @property
    def path(self) -> str:
        return self.slots[0].path

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logical tensor."""
        return tuple(self.tensor.shape) if self.whole is None else self.whole

    @property
    def is_trained(self) -> bool:
        """True if a backward accumulates into its `.grad`."""
        return self.tensor.requires_grad and self.tensor.is_leaf


@dataclass(eq=False, slots=True)
class ActorState:
    """Everything that an actor's attributes reach.

    Attributes:
        tensors: its tensors, each once.
        objects: (object, path) of what has attributes: the actor, its modules, its plain objects.
        containers: (container, path) of every dict, list, set and deque, `__dict__`s included.
        trainers: optimizers and the like, which are not walked.
        others: (value, path) of arrays, generators and the like, which can change in place.
    """

    tensors: list[StateTensor] = field(default_factory=list)
    objects: list[tuple[Any, str]] = field(default_factory=list)
    containers: list[tuple[Any, str]] = field(default_factory=list)
    trainers: list[Any] = field(default_factory=list)
    others: list[tuple[Any, str]] = field(default_factory=list)


def collect(
    actor: Any, arguments: Sequence[tuple[Any, str]] = (), trainers: bool = False
) -> ActorState:
    """Walk an actor's attributes.

    Args:
        actor: the actor.
        arguments: objects among its method's arguments, with names. Their tensors are no state.
        trainers: whether what optimizers and the like hold is state as well.

    Raises:
        TraceError: a parameter is not initialised yet (a lazy module).
    """
    walk = _StateWalk()
    walk.visit_object(actor, "")
    if trainers:
        walk.visit_trainers()
    tensors = [StateTensor(t.tensor, list(t.slots)) for t in walk.state.tensors]
    for value, path in arguments:
        walk.visit(value, path, None)
    walk.visit_behind_functions()
    walk.state.tensors = tensors
    return walk.state


def reach(value: Any, behind: Callable[[Any], Iterable[Any]] = lambda value: ()) -> ActorState:
    """Walk everything that a value reaches, optimizers and the like included.

    Parameters that are not initialised yet are left out.

    Args:
        value: where the walk begins.
        behind: gives what else to walk where there is such a value.
    """
    walk = _StateReach(behind)
    walk.visit(value, "", None)
    walk.visit_trainers()
    return walk.state


_LEAVES = (*SCALARS, weakref.ref)

_Place: TypeAlias = tuple[Any, Any, tuple[int, ...]] | None
"""The first three fields of a `StateAttribute`; None inside of a set."""


class _StateWalk:
    _bare = frozenset({dict, collections.OrderedDict, list})
    """Containers that need no visit if they are empty, as are most of a module's."""

    def __init__(self) -> None:
        self.state = ActorState()
        self._seen: set[int] = set()
        self._tensors: dict[int, StateTensor] = {}
        self._functions: list[tuple[Any, str]] = []
        self._is_behind = False  # behind a function that holds values
        self._leaves: set[type] = set()  # so that the tests below are made once for each type

    def _is_leaf(self, value: Any) -> bool:
        """True if a value says everything by its type and itself."""
        kind = type(value)
        if kind in self._leaves:
            return True
        is_leaf = isinstance(value, _LEAVES)
        if is_leaf and value.__class__ is kind:  # not a proxy, which is like its referent
            self._leaves.add(kind)
        return is_leaf

    def visit(self, value: Any, path: str, slot: _Place) -> None:
        if isinstance(value, torch.Tensor):
            self._visit_tensor(value, path, slot)
        elif id(value) in self._seen:
            return
        elif isinstance(value, (dict, list, set, frozenset, collections.deque)):
            self._visit_container(value, path)
        elif self._is_leaf(value):
            return
        elif isinstance(value, tuple):
            self._visit_tuple(value, path, slot)
        elif isinstance(value, TRAINERS):
            self._seen.add(id(value))
            self.state.trainers.append(value)
        elif isinstance(value, BOUND):
            self._seen.add(id(value))
            self._functions.append((value, path))
        elif is_walked(value):
            self.visit_object(value, path)
        elif has_slots(value) and is_of_model(value):
            self.visit_object(value, path)
            self.state.others.append((value, path))
            for name, item in slots_of(value).items():
                self.visit(item, join(path, name), None)
        elif is_stateful(value):
            self._seen.add(id(value))
            self.state.others.append((value, path))

    def visit_object(self, value: Any, path: str) -> None:
        self._seen.add(id(value))
        self.state.objects.append((value, path))
        self._visit_container(vars(value) if hasattr(value, "__dict__") else {}, path)

    def visit_behind_functions(self) -> None:
        """Walk what bound methods and partial functions hold, once all else is walked."""
        self._is_behind = True
        for function, path in self._functions:  # which grows
            for name, value in held_by(function).items():
                self.visit(value, join(path, name), None)

    def visit_trainers(self) -> None:
        for trainer in self.state.trainers:  # which grows: a scheduler holds an optimizer
            self.visit_object(trainer, type(trainer).__name__)

    def _visit_tensor(self, tensor: torch.Tensor, path: str, slot: _Place) -> None:
        if slot is None:
            return  # in a set: not part of the state
        if torch.nn.parameter.is_lazy(tensor):
            raise TraceError(
                f"parameter '{path}' is not initialised yet",
                remedy="run the lazy module once on an example before the step is traced",
            )
        known = self._tensors.get(id(tensor))
        if known is None:
            known = self._tensors[id(tensor)] = StateTensor(tensor, [])
            self.state.tensors.append(known)
        known.slots.append(StateAttribute(*slot, path))

    def _visit_tuple(self, value: tuple[Any, ...], path: str, slot: _Place) -> None:
        for index, item in enumerate(value):
            inner = None if slot is None else (slot[0], slot[1], (*slot[2], index))
            self.visit(item, join(path, index), inner)

    def _visit_container(self, container: Any, path: str) -> None:
        self._seen.add(id(container))
        if not isinstance(container, frozenset):
            self.state.containers.append((container, path))
        if not container or len(container) > _MANY:
            return
        addressable = isinstance(container, (dict, list)) and not self._is_behind
        leaves = self._leaves
        for key, item in items_of(container):
            if type(item) in leaves:
                continue
            here = path if key in _MODULE_DICTS and isinstance(container, dict) else join(path, key)
            if type(item) in self._bare and not item:
                if id(item) not in self._seen:
                    self._seen.add(id(item))
                    self.state.containers.append((item, here))
                continue
            self.visit(item, here, (container, key, ()) if addressable else None)


class _StateReach(_StateWalk):
    """A walk that takes tensors in sets, too, and skips parameters that are not initialised yet."""

    _bare = frozenset()  # `behind` is asked about each value

    def __init__(self, behind: Callable[[Any], Iterable[Any]]) -> None:
        super().__init__()
        self._behind = behind

    def visit(self, value: Any, path: str, slot: _Place) -> None:
        for item in self._behind(value):
            super().visit(item, path, None)
        super().visit(value, path, slot)

    def _visit_tensor(self, tensor: torch.Tensor, path: str, slot: _Place) -> None:
        if not torch.nn.parameter.is_lazy(tensor):
            super()._visit_tensor(tensor, path, slot or ((tensor,), 0, ()))


_MODULE_DICTS = frozenset({"_parameters", "_buffers", "_modules"})


def put_state(state: ActorState, values: Sequence[torch.Tensor]) -> None:
    """Put other tensors into all slots of an actor's state.

    Weak references in lists follow: `nn.LSTM` keeps some to its parameters, and compares them.

    Args:
        state: the state whose slots to fill.
        values: one for each of `state.tensors`.
    """
    instead = {id(t.tensor): value for t, value in zip(state.tensors, values, strict=True)}
    for tensor in state.tensors:
        for slot in tensor.slots:
            slot.put(instead[id(tensor.tensor)])
    for container, _ in state.containers:
        if isinstance(container, list):
            for index, item in enumerate(container):
                if isinstance(item, weakref.ref) and id(item()) in instead:
                    container[index] = weakref.ref(instead[id(item())])
