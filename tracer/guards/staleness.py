"""The guard of a trace: has the actor changed in a way that the trace did not foresee?

Tracing bakes in what Python code reads: flags, sizes, which submodule comes next, and that an
attribute is not there. The guard compares exactly what was read, with the types of objects and
with the containers in which bodies look tensors up. It runs before every execution, so it compares
identities in C, and looks closer only where these differ.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterable, Sequence
from types import MemberDescriptorType
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as modules

from ..actors.actor_state import ActorState, StateTensor
from ..functions.interface import Guard
from ..heap.kinds import is_foreign, is_plain
from ..heap.snapshot import MISSING
from ..methods.watch import EVERYTHING
from ..step.specs import static_key
from .flat import Flat
from .snapshots import (
    Attributes,
    Comparison,
    Difference,
    Elements,
    Entries,
    Items,
    Members,
    Picture,
    Plain,
    Reference,
    TensorPicture,
    Thing,
    elements,
    group_of,
)

_AGAIN = "trace the step again (lower and compile it anew) to use the actor as it is now"
_MODULE_GROUPS = ("", "_modules", "_parameters", "_buffers")
_OF_MODULES = frozenset(vars(torch.nn.Module)) - {"forward", "__call__"}
"""What modules have by their class, and nobody gives an attribute to."""

_GLOBAL_HOOKS = {
    name: value
    for name, value in vars(modules).items()
    if name.startswith("_global_") and isinstance(value, dict)
}


def build_guard(
    state: ActorState,
    reads: dict[int, set[str]],
    used: Iterable[StateTensor],
    who: str,
    method: str,
    given: Sequence[tuple[Any, str]] = (),
) -> Guard | None:
    """A guard over the attributes `reads` (by object id) and the tensors `used`.

    It is called with the actor as it was traced: attributes at their own values.

    Args:
        who: the actor's class, for the message.
        method: the actor's method, by name.
        given: objects among the arguments, with their names.

    Returns:
        None if the trace relied on nothing.
    """
    tensors = list(used)
    if not tensors and not any(reads.values()):
        return None
    reads[id(state.objects[0][0])].add(method)
    return _Guard(state, reads, tensors, who, given).check


class _Guard:
    """What a trace relied on."""

    def __init__(
        self,
        state: ActorState,
        reads: dict[int, set[str]],
        used: Sequence[StateTensor],
        who: str,
        given: Sequence[tuple[Any, str]],
    ) -> None:
        camera = _Camera(state.objects[0][0], reads, used)
        self._who = who
        self._used = {camera.number(t.tensor): t for t in used}
        roots = [*state.objects[:1], *given]
        self._roots = [(obj, path, camera.take(obj)) for obj, path in roots]
        if any(isinstance(obj, torch.nn.Module) for obj, _ in state.objects):
            hooks = ((hooks, name) for name, hooks in _GLOBAL_HOOKS.items())
            self._roots += [(value, name, camera.take(value)) for value, name in hooks]
        self._roots += camera.classes()
        self._flat = Flat()
        self._plain: list[Any] = []
        self._ties: list[list[tuple[Any, Any]]] = []
        self._flatten()

    def _flatten(self) -> None:
        flat = Flat()
        for value, _, picture in self._roots:
            picture.flatten(value, flat)
        self._flat = flat
        self._plain = [_tensor_check(number, t, flat) for number, t in self._used.items()]
        self._ties = [places for places in flat.tensors.values() if len(places) > 1]

    def check(self) -> str | None:
        """None, or what has changed."""
        try:
            if not self._holds():
                return self._look_closer()
            for holder, key, shape, dtype, flag, dense, _ in self._plain:
                tensor = holder[key]
                if (
                    tensor.requires_grad is not flag
                    or tensor.dtype is not dtype
                    or tensor.shape != shape
                    or tensor.is_contiguous() is not dense
                    or (flag and (tensor._backward_hooks or tensor._post_accumulate_grad_hooks))
                ):
                    return self._explain_tensors() or self._look_closer()
        except (LookupError, AttributeError, TypeError, ValueError, RuntimeError):
            return self._look_closer()
        return None

    def _holds(self) -> bool:
        if not self._flat.holds():
            return False
        for places in self._ties:
            holder, key = places[0]
            first = holder[key]
            if any(holder[key] is not first for holder, key in places):
                return False
        return True

    def _look_closer(self) -> str | None:
        """What has changed; where identities have and nothing else, the guard follows them."""
        met = Comparison()
        for value, path, picture in self._roots:
            try:
                found = picture.differ(value, path, met)
            except (LookupError, AttributeError, TypeError, ValueError, RuntimeError):
                return f"{self._who} has changed since it was traced; {_AGAIN}"
            if found is not None:
                return self._explain(found)
        self._flatten()
        return self._explain_tensors()

    def _explain(self, found: Difference) -> str:
        if found.after is MISSING:
            return f"{self._who} has lost the attribute '{found.path}'; {_AGAIN}"
        if found.before.startswith("one tensor with"):
            other = found.before.partition("'")[2].removesuffix("'")
            both = f"'{other}' and '{found.path}'"
            return f"{self._who}: {both} were one tensor when it was traced; {_AGAIN}"
        path = f"'{found.path}'" if found.path else "it"
        return (
            f"{self._who}: {path} was {_short(found.before)} when it was traced and is "
            f"{_short(_repr(found.after))} now; {_AGAIN}"
        )

    def _explain_tensors(self) -> str | None:
        for holder, key, shape, dtype, flag, dense, path in self._plain:
            tensor = holder[key]
            if tensor.requires_grad and (
                tensor._backward_hooks or tensor._post_accumulate_grad_hooks
            ):
                return (
                    f"{self._who}: '{path}' has a gradient hook now, which a traced step does not "
                    f"call; {_AGAIN}"
                )
            now = (tensor.shape, tensor.dtype, tensor.requires_grad, tensor.is_contiguous())
            if now != (shape, dtype, flag, dense):
                return (
                    f"{self._who}: shape, dtype, layout or requires_grad of '{path}' has changed "
                    f"since it was traced (now {tensor.dtype}, {tuple(tensor.shape)}, "
                    f"requires_grad={tensor.requires_grad}); {_AGAIN}"
                )
        return None


def _tensor_check(number: int, tensor: StateTensor, flat: Flat) -> Any:
    now = tensor.tensor
    places = flat.tensors.get(number)
    holder, key = places[0] if places else _innermost(tensor)
    return (
        *(holder, key, now.shape, now.dtype, now.requires_grad, now.is_contiguous()),
        tensor.path,
    )


def _innermost(tensor: StateTensor) -> tuple[Any, Any]:
    slot = tensor.slots[0]
    holder, key = slot.holder, slot.key
    for index in slot.within:
        holder, key = holder[key], index
    return holder, key


class _Camera:
    """Takes pictures of what a trace has read."""

    def __init__(self, actor: Any, reads: dict[int, set[str]], used: Sequence[StateTensor]) -> None:
        self._actor = actor
        self._reads = reads
        self._pinned = {id(t.slots[0].holder) for t in used}
        self._taken: dict[int, Picture] = {}
        self._numbers: dict[int, int] = {}
        self._inherited: dict[type, set[str]] = {}

    def number(self, tensor: torch.Tensor) -> int:
        return self._numbers.setdefault(id(tensor), len(self._numbers))

    def take(self, value: Any) -> Picture:
        """A picture of a value."""
        known = self._taken.get(id(value))
        if known is not None:
            return known
        if isinstance(value, torch.Tensor):
            return TensorPicture(self.number(value))
        if id(value) in self._reads:
            return self._object(value)
        if is_plain(value):
            return Plain(static_key(value), repr(value))
        if isinstance(value, weakref.ref):
            return Reference()
        if isinstance(value, (np.ndarray, bytearray)):
            return Elements(elements(value), _short(repr(value)))
        if isinstance(value, (list, tuple, collections.deque)):
            return self._items(value)
        if isinstance(value, dict):
            return self._entries(value)
        if isinstance(value, (set, frozenset)):
            return Members(type(value), frozenset(value))
        return Thing(value)

    def _items(self, value: Any) -> Picture:
        taken = self._taken[id(value)] = Items(type(value), self._pin(value))
        taken.items = [self.take(item) for item in value]
        return taken

    def _entries(self, value: dict[Any, Any]) -> Picture:
        taken = self._taken[id(value)] = Entries(type(value), self._pin(value))
        taken.keys = list(value)
        taken.values = [self.take(dict.__getitem__(value, key)) for key in value]
        return taken

    def _pin(self, container: Any) -> Any:
        return container if id(container) in self._pinned else None

    def _object(self, obj: Any) -> Picture:
        taken = self._taken[id(obj)] = Attributes(type(obj), obj)
        names = set(self._reads[id(obj)])
        attributes = group_of(obj, "")
        groups = _MODULE_GROUPS if isinstance(obj, torch.nn.Module) else ("",)
        if EVERYTHING in names:
            names |= set(attributes)
            taken.whole = tuple(attributes)
        if any(id(group_of(obj, name)) in self._pinned for name in groups):
            taken.pinned = True
        names = {name for name in names if not name.startswith("__")}
        found: set[str] = set()
        for group in groups:
            space = group_of(obj, group)
            present = {n: self.take(space[n]) for n in sorted(names - found) if n in space}
            found |= present.keys()
            taken.groups.append((group, present, set()))
        names -= found
        known = {name for name in names if hasattr(type(obj), name)}
        for group, _, absent in taken.groups:
            # What the class has is hidden by the object's own attributes alone.
            absent |= names - _OF_MODULES - (known if group else set())
        self._slots(obj, names, taken)
        self._inherited.setdefault(type(obj), set()).update(names)
        return taken

    def _slots(self, obj: Any, names: set[str], taken: Attributes) -> None:
        for name in sorted(names):
            if isinstance(getattr(type(obj), name, None), MemberDescriptorType):
                value = getattr(obj, name, MISSING)
                taken.slots[name] = None if value is MISSING else self.take(value)

    def classes(self) -> list[tuple[Any, str, Picture]]:
        """Pictures of what the objects seen so far have from their classes, or lack there."""
        found: dict[type, set[str]] = {}
        for cls, names in self._inherited.items():
            left = names | {"__call__"}
            for base in cls.__mro__[:-1]:
                found.setdefault(base, set()).update(left)
                left -= vars(base).keys()
        actor = type(self._actor).__mro__
        return [
            (cls, "" if cls in actor else cls.__name__, self._class(cls, names))
            for cls, names in found.items()
        ]

    def _class(self, cls: type, names: set[str]) -> Picture:
        space = vars(cls)
        own = not is_foreign(cls)
        present: dict[str, Picture] = {
            name: self.take(space[name]) if own and _is_data(space[name]) else Thing(space[name])
            for name in sorted(names)
            if name in space
        }
        return Attributes(type(cls), cls, groups=[("", present, names - present.keys())])


def _is_data(value: Any) -> bool:
    """Whether an attribute of a class is plain data: numbers, words, and containers of them."""
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(map(_is_data, value))
    if isinstance(value, dict):
        return all(map(_is_data, value.values()))
    return is_plain(value)


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # of the user's own
        return f"an object of class {type(value).__qualname__}"


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
