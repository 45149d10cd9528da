"""Finding the state of an actor: every tensor that its attributes reach, and what holds each.

An actor is a `torch.nn.Module` or any other object. Its state is found by walking attributes,
modules, lists, dicts, tuples and plain objects. What holds a tensor is remembered as a `Slot`, so
that tracing can put a fake in its place and a body can look the live tensor up again.
"""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import TraceError
from ..methods.contents import has_slots, kind_of, slots_of

SCALARS: tuple[type, ...] = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    range,
    slice,
    type,
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)
"""Types whose values say everything about them."""

TRAINERS: tuple[type, ...] = (
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.optim.lr_scheduler.ReduceLROnPlateau,
    torch.amp.GradScaler,
)
"""Objects that work on gradients; a method that touches one is called as it is."""

_HOLDERS: tuple[type, ...] = (
    types.SimpleNamespace,
    argparse.Namespace,
    collections.UserDict,
    collections.UserList,
)
"""Classes of Python's own whose objects are nothing but what they hold."""

_MANY = 10_000
_OWN_ROOMS = tuple(
    f"{__name__.rpartition('.tracer.')[0]}.{room}."
    for room in ("ir", "tracer", "backends", "launch")
)


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """Where a tensor of the actor's state hangs.

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
        """What is there now.

        Raises:
            LookupError: nothing is.
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
    """One tensor of the state with all the slots that hold it (several: a tied tensor)."""

    tensor: torch.Tensor
    slots: list[Slot]

    @property
    def path(self) -> str:
        return self.slots[0].path

    @property
    def is_trained(self) -> bool:
        """Whether a backward accumulates into its `.grad`."""
        return self.tensor.requires_grad and self.tensor.is_leaf


@dataclass(eq=False, slots=True)
class ActorState:
    """Everything that an actor's attributes reach.

    Attributes:
        tensors: its tensors, each once.
        objects: (object, path): what has attributes: the actor, its modules, its plain objects.
        containers: (container, path): every dict, list, set and deque, `__dict__`s included.
        trainers: optimizers and the like, which are not walked.
        others: (value, path): arrays, generators and the like, which can change in place.
    """

    tensors: list[StateTensor] = field(default_factory=list)
    objects: list[tuple[Any, str]] = field(default_factory=list)
    containers: list[tuple[Any, str]] = field(default_factory=list)
    trainers: list[Any] = field(default_factory=list)
    others: list[tuple[Any, str]] = field(default_factory=list)


def collect(actor: Any, given: Sequence[tuple[Any, str]] = ()) -> ActorState:
    """Walk an actor's attributes.

    Args:
        given: objects that its method is given, with names. Their tensors are no state.

    Raises:
        TraceError: a parameter is not initialised yet (a lazy module).
    """
    walk = _Walk()
    walk.visit_object(actor, "")
    tensors = [StateTensor(t.tensor, list(t.slots)) for t in walk.state.tensors]
    for value, path in given:
        walk.visit(value, path, None)
    walk.state.tensors = tensors
    return walk.state


def collect_everything(actor: Any) -> ActorState:
    """As `collect`, and what optimizers and the like hold as well.

    Raises:
        TraceError: a parameter is not initialised yet (a lazy module).
    """
    walk = _Walk()
    walk.visit_object(actor, "")
    for trainer in walk.state.trainers:  # which grows: a scheduler holds an optimizer
        walk.visit_object(trainer, type(trainer).__name__)
    return walk.state


def reach(value: Any, behind: Callable[[Any], Iterable[Any]] = lambda value: ()) -> ActorState:
    """Everything that any value reaches, by way of optimizers and the like as well.

    Parameters that are not initialised yet are left out.

    Args:
        behind: what else is to be walked where there is such a value.
    """
    walk = _Reach(behind)
    walk.visit(value, "", None)
    for trainer in walk.state.trainers:
        walk.visit_object(trainer, type(trainer).__name__)
    return walk.state


class _Walk:
    def __init__(self) -> None:
        self.state = ActorState()
        self._seen: set[int] = set()
        self._tensors: dict[int, StateTensor] = {}

    def visit(self, value: Any, path: str, slot: tuple[Any, Any, tuple[int, ...]] | None) -> None:
        if isinstance(value, torch.Tensor):
            self._visit_tensor(value, path, slot)
        elif isinstance(value, (*SCALARS, weakref.ref)) or id(value) in self._seen:
            return
        elif isinstance(value, tuple):
            self._visit_tuple(value, path, slot)
        elif isinstance(value, (dict, list, set, frozenset, collections.deque)):
            self._visit_container(value, path)
        elif isinstance(value, TRAINERS):
            self._seen.add(id(value))
            self.state.trainers.append(value)
        elif is_walked(value):
            self.visit_object(value, path)
        elif has_slots(value) and _is_foreseen(value):
            self.visit_object(value, path)
            self.state.others.append((value, path))
            for name, item in slots_of(value).items():
                self.visit(item, _join(path, name), None)
        elif kind_of(value) is not None:
            self._seen.add(id(value))
            self.state.others.append((value, path))

    def visit_object(self, value: Any, path: str) -> None:
        self._seen.add(id(value))
        self.state.objects.append((value, path))
        self._visit_container(vars(value) if hasattr(value, "__dict__") else {}, path)

    def _visit_tensor(
        self, tensor: torch.Tensor, path: str, slot: tuple[Any, Any, tuple[int, ...]] | None
    ) -> None:
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
        known.slots.append(Slot(*slot, path))

    def _visit_tuple(
        self, value: tuple[Any, ...], path: str, slot: tuple[Any, Any, tuple[int, ...]] | None
    ) -> None:
        for index, item in enumerate(value):
            inner = None if slot is None else (slot[0], slot[1], (*slot[2], index))
            self.visit(item, _join(path, index), inner)

    def _visit_container(self, container: Any, path: str) -> None:
        self._seen.add(id(container))
        if not isinstance(container, frozenset):
            self.state.containers.append((container, path))
        if len(container) > _MANY:
            return
        items = container.items() if isinstance(container, dict) else enumerate(container)
        addressable = isinstance(container, (dict, list))
        for key, item in list(items):
            if isinstance(item, SCALARS):
                continue
            here = (
                path if key in _MODULE_DICTS and isinstance(container, dict) else _join(path, key)
            )
            self.visit(item, here, (container, key, ()) if addressable else None)


class _Reach(_Walk):
    """A walk that needs to know of no tensor what holds it."""

    def __init__(self, behind: Callable[[Any], Iterable[Any]]) -> None:
        super().__init__()
        self._behind = behind

    def visit(self, value: Any, path: str, slot: tuple[Any, Any, tuple[int, ...]] | None) -> None:
        for each in self._behind(value):
            super().visit(each, path, None)
        super().visit(value, path, slot)

    def _visit_tensor(
        self, tensor: torch.Tensor, path: str, slot: tuple[Any, Any, tuple[int, ...]] | None
    ) -> None:
        if not torch.nn.parameter.is_lazy(tensor):
            super()._visit_tensor(tensor, path, slot or ((tensor,), 0, ()))


_MODULE_DICTS = frozenset({"_parameters", "_buffers", "_modules"})


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def is_walked(value: Any) -> bool:
    """Whether an object's attributes count as the actor's own."""
    if isinstance(value, (torch.nn.Module, *_HOLDERS)):
        return True
    return isinstance(getattr(value, "__dict__", None), dict) and _is_foreseen(value)


def _is_foreseen(value: Any) -> bool:
    """Whether an object is of a class that the user, or a library of models, has written."""
    module = type(value).__module__ + "."
    root = module.partition(".")[0]
    return (
        root not in ("torch", "numpy")
        and (root not in sys.stdlib_module_names or root == "__main__")
        and not module.startswith(_OWN_ROOMS)
    )


def put_state(state: ActorState, values: Sequence[torch.Tensor]) -> None:
    """Put other tensors into all slots of an actor's state.

    Weak references in lists follow: `nn.LSTM` keeps some, and compares.

    Args:
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


def reaches_tensor(value: Any, known: set[int]) -> bool:
    """Whether a tensor can be reached from a value, not looking into what is `known` (by id).

    What it has looked into is known from then on.
    """
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, SCALARS) or id(value) in known:
        return False
    known.add(id(value))
    return any(reaches_tensor(part, known) for part in _parts(value))


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return list(value)
    if isinstance(value, types.ModuleType):
        return []
    found: list[Any] = list(getattr(value, "__dict__", {}).values())
    found += slots_of(value).values()
    if isinstance(value, types.MethodType):
        found += [value.__self__, value.__func__]
    elif isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        found += [cell.cell_contents for cell in cells if _is_full(cell)]
        found += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif isinstance(value, functools.partial):
        found += [value.func, *value.args, *value.keywords.values()]
    return found


def _is_full(cell: types.CellType) -> bool:
    try:
        return bool([cell.cell_contents])
    except ValueError:
        return False
