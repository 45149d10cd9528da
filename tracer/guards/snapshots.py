"""Pictures of Python values: what a trace has read of them, to compare with what they are later.

A picture keeps values that say everything about themselves by type and value, containers by what
is in them, watched objects by the attributes that were read, and all else by identity. `differ`
compares thoroughly, path by path. `flatten` makes of it what is compared before every execution.
"""

from __future__ import annotations

import hashlib
import inspect
import weakref
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from ..heap.kinds import is_plain, join
from ..heap.snapshot import MISSING
from ..step.specs import static_key
from .flat import Flat

_FEW = 16
"""Of a longer list, the items are compared in one go."""


class _Words(str):
    """Stands for a value in a message."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a value differs, in words: `path` was `before` and is `after`.

    `after` is `MISSING` where an attribute is no longer there.
    """

    path: str
    before: str
    after: Any


@dataclass(eq=False, slots=True)
class Comparison:
    """One thorough comparison: what has been met on the way.

    Attributes:
        tensors: the tensor that stands where each picture of a tensor was taken.
        met: pairs of picture and value that have been compared, or are being.
    """

    tensors: dict[int, tuple[torch.Tensor, str]] = field(default_factory=dict)
    met: set[tuple[int, int]] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Plain:
    """A value that says everything about itself."""

    key: tuple[Any, ...]
    shown: str

    def differ(self, now: Any, path: str, met: Comparison) -> Difference | None:
        if type(now) is self.key[0] and static_key(now) == self.key:
            return None
        return Difference(path, self.shown, now)

    def flatten(self, now: Any, flat: Flat) -> None:
        pass

    def show(self) -> str:
        return self.shown


@dataclass(frozen=True, slots=True)
class Thing:
    """An object that is looked at as a whole: by identity, or as it compares itself."""

    value: Any

    def differ(self, now: Any, path: str, met: Comparison) -> Difference | None:
        if now is self.value or (type(now) is type(self.value) and _equal(self.value, now)):
            return None
        return Difference(path, repr(self.value), now)

    def flatten(self, now: Any, flat: Flat) -> None:
        pass

    def show(self) -> str:
        return repr(self.value)


@dataclass(frozen=True, slots=True)
class TensorPicture:
    """A tensor: of the actor's state, so another one may stand there by now.

    `number` is the same for all places of a tied tensor.
    """

    number: int

    def differ(self, now: Any, path: str, met: Comparison) -> Difference | None:
        if not isinstance(now, torch.Tensor):
            return Difference(path, "a tensor", now)
        known, where = met.tensors.setdefault(self.number, (now, path))
        if known is not now:
            return Difference(path, f"one tensor with '{where}'", _Words("another one"))
        return None

    def flatten(self, now: Any, flat: Flat) -> None:
        pass

    def show(self) -> str:
        return "a tensor"


@dataclass(frozen=True, slots=True)
class Reference:
    """A weak reference; a module keeps some to its own parameters."""

    def differ(self, now: Any, path: str, met: Comparison) -> Difference | None:
        return None if isinstance(now, weakref.ref) else Difference(path, "a reference", now)

    def flatten(self, now: Any, flat: Flat) -> None:
        pass

    def show(self) -> str:
        return "a reference"


@dataclass(frozen=True, slots=True)
class Elements:
    """An array, by a digest of its elements."""

    key: Any
    shown: str

    def differ(self, now: Any, path: str, met: Comparison) -> Difference | None:
        if elements(now) == self.key:
            return None
        return Difference(path, self.shown, now)

    def flatten(self, now: Any, flat: Flat) -> None:
        flat.digest(now, elements, self.key)

    def show(self) -> str:
        return self.shown


@dataclass(frozen=True, slots=True)
class Members:
    """A set."""

    kind: type
    values: frozenset[Any]

    def differ(self, now: Any, path: str, met: Comparison) -> Difference | None:
        same = type(now) is self.kind and now == self.values
        return None if same else Difference(path, self.show(), now)

    def flatten(self, now: Any, flat: Flat) -> None:
        if self.kind is set:
            flat.members(now)

    def show(self) -> str:
        return repr(set(self.values)) if self.kind is set else repr(self.values)


@dataclass(slots=True)
class Items:
    """A list, tuple or deque; `pinned` if a body looks tensors up in this very container."""

    kind: type
    pinned: Any = None
    items: list[Picture] = field(default_factory=list)

    def differ(self, now: Any, path: str, met: Comparison) -> Difference | None:
        if not _is_of(now, self.kind) or len(now) != len(self.items):
            return Difference(path, self.show(), now)
        if self.pinned is not None and now is not self.pinned:
            return Difference(path, f"one {self.kind.__name__} of tensors", _Words("another one"))
        for index, (item, value) in enumerate(zip(self.items, now, strict=True)):
            found = _differ(item, value, join(path, index), met)
            if found is not None:
                return found
        return None

    def flatten(self, now: Any, flat: Flat) -> None:
        fixed = isinstance(now, tuple)
        if not fixed:
            flat.size(now)
        if not fixed and len(now) > _FEW and not any(map(_may_move, self.items)):
            flat.many(lambda: now)
            fixed = True
        for index, (item, value) in enumerate(zip(self.items, now, strict=True)):
            _flatten_entry(item, now, index, value, flat, fixed)

    def show(self) -> str:
        inner = ", ".join(item.show() for item in self.items[:9])
        inner += ", ..." if len(self.items) > 9 else ""
        if self.kind in (list, tuple):
            return f"[{inner}]" if self.kind is list else f"({inner})"
        return f"{self.kind.__name__}([{inner}])"


@dataclass(slots=True)
class Entries:
    """A dict with its order; `pinned` as of `Items`."""

    kind: type
    pinned: Any = None
    keys: list[Any] = field(default_factory=list)
    values: list[Picture] = field(default_factory=list)

    def differ(self, now: Any, path: str, met: Comparison) -> Difference | None:
        if not _is_of(now, self.kind) or list(now) != self.keys:
            return Difference(path, self.show(), now)
        if self.pinned is not None and now is not self.pinned:
            return Difference(path, f"one {self.kind.__name__} of tensors", _Words("another one"))
        inner = path.removesuffix("_modules").removesuffix(".")
        for key, picture in zip(self.keys, self.values, strict=True):
            found = _differ(picture, dict.__getitem__(now, key), join(inner, key), met)
            if found is not None:
                return found
        return None

    def flatten(self, now: Any, flat: Flat) -> None:
        flat.size(now)
        if not now:
            return
        flat.many(lambda: now)
        fixed = not any(map(_may_move, self.values))
        if fixed:
            flat.many(lambda: dict.values(now))
        for key, picture in zip(self.keys, self.values, strict=True):
            _flatten_entry(picture, now, key, dict.__getitem__(now, key), flat, fixed)

    def show(self) -> str:
        pairs = zip(self.keys[:9], self.values[:9], strict=True)
        inner = ", ".join(f"{key!r}: {picture.show()}" for key, picture in pairs)
        return "{" + inner + (", ...}" if len(self.keys) > 9 else "}")


@dataclass(slots=True)
class Attributes:
    """A watched object, or a class, by the attributes that were read.

    Attributes:
        kind: its class.
        original: the object.
        pinned: whether a body looks tensors up among its attributes.
        groups: for each of its dicts: what was read there, and what was asked for in vain.
        slots: attributes without a dict; None: it was not there.
        whole: whether code has looked at all attributes at once.
    """

    kind: type
    original: Any
    pinned: bool = False
    groups: list[tuple[str, dict[str, Picture], set[str]]] = field(default_factory=list)
    slots: dict[str, Picture | None] = field(default_factory=dict)
    whole: tuple[str, ...] | None = None

    def differ(self, now: Any, path: str, met: Comparison) -> Difference | None:
        if type(now) is not self.kind and now is self.original:
            after = _Words(f"of class {type(now).__qualname__}")
            return Difference(path, f"of class {self.kind.__qualname__}", after)
        if type(now) is not self.kind or (self.pinned and now is not self.original):
            return Difference(path, self.show(), now)
        for name, present, absent in self.groups:
            space = group_of(now, name)
            found = _differ_in(space, present, path, met) or self._shadowed(space, absent, path)
            if found is not None:
                return found
        if self.whole is not None and tuple(group_of(now, "")) != self.whole:
            return Difference(path, f"an object with {', '.join(self.whole)}", now)
        for name, picture in self.slots.items():
            value = getattr(now, name, MISSING)
            if picture is None or value is MISSING:
                if (picture is None) != (value is MISSING):
                    before = "not there" if picture is None else picture.show()
                    return Difference(join(path, name), before, value)
                continue
            found = _differ(picture, value, join(path, name), met)
            if found is not None:
                return found
        return None

    def _shadowed(self, space: Any, absent: set[str], path: str) -> Difference | None:
        """An attribute that was not there; one that is as that of the class makes no difference."""
        for key in [key for key in absent if key in space]:
            inherited = inspect.getattr_static(self.kind, key, MISSING)
            if not is_plain(inherited) or static_key(inherited) != static_key(space[key]):
                before = "not there" if inherited is MISSING else repr(inherited)
                return Difference(join(path, key), before, space[key])
            absent.remove(key)
            present = next(present for name, present, _ in self.groups if not name)
            present[key] = Plain(static_key(inherited), repr(inherited))
        return None

    def flatten(self, now: Any, flat: Flat) -> None:
        if not isinstance(now, type):
            flat.of_type(now, self.kind)
        for name, present, absent in self.groups:
            space = group_of(now, name)
            if name and present:
                flat.entry(group_of(now, ""), name, space)
            for key, picture in present.items():
                _flatten_entry(picture, space, key, space[key], flat, False)
            for key in absent:
                flat.absent(space, key)
        if self.whole is not None:
            attributes = group_of(now, "")
            flat.size(attributes)
            flat.many(lambda: attributes)
        for name, slot in self.slots.items():
            value = getattr(now, name, MISSING)
            flat.slot(now, name, value)
            if slot is not None:
                slot.flatten(value, flat)

    def show(self) -> str:
        try:
            return repr(self.original)
        except Exception:  # of the user's own
            return f"an object of class {self.kind.__qualname__}"


Picture: TypeAlias = (
    Plain | Thing | TensorPicture | Reference | Elements | Members | Items | Entries | Attributes
)


def _is_of(value: Any, kind: type) -> bool:
    return type(value) is kind


def group_of(obj: Any, name: str) -> Any:
    """The attributes of an object, or those of its dicts that has this name."""
    attributes = vars(obj) if hasattr(obj, "__dict__") else {}
    return attributes[name] if name else attributes


def _differ_in(
    space: Any,
    present: dict[str, Picture],
    path: str,
    met: Comparison,
) -> Difference | None:
    for key, picture in present.items():
        if key not in space:
            return Difference(join(path, key), picture.show(), MISSING)
        found = _differ(picture, space[key], join(path, key), met)
        if found is not None:
            return found
    return None


def _differ(picture: Picture, now: Any, path: str, met: Comparison) -> Difference | None:
    if isinstance(picture, (Items, Entries, Attributes)):
        pair = (id(picture), id(now))
        if pair in met.met:
            return None
        met.met.add(pair)
    return picture.differ(now, path, met)


def _flatten_entry(
    picture: Picture, holder: Any, key: Any, value: Any, flat: Flat, fixed: bool
) -> None:
    """What is at one place; `fixed` if nothing else can get there unnoticed."""
    if isinstance(picture, TensorPicture):
        flat.tensors.setdefault(picture.number, []).append((holder, key))
    elif not isinstance(picture, Reference) and not fixed:
        flat.entry(holder, key, value)
    if isinstance(picture, (Items, Entries, Attributes)):
        if (id(picture), id(value)) in flat.met:
            return
        flat.met.add((id(picture), id(value)))
    picture.flatten(value, flat)


def _may_move(picture: Picture) -> bool:
    """Whether another object may stand in its place, without a difference."""
    return isinstance(picture, (TensorPicture, Reference))


def elements(value: Any) -> Any:
    """What arrays with the same elements have in common; None for what is no array."""
    if isinstance(value, np.ndarray):
        content = np.ascontiguousarray(value)
        dtype = str(value.dtype)
        if value.dtype.hasobject:
            return (dtype, value.shape, id(value), repr(content))
        return (
            dtype,
            value.shape,
            hashlib.blake2b(content.reshape(-1).view(np.uint8).data).digest(),
        )
    return bytes(value) if isinstance(value, bytearray) else None


def _equal(before: Any, after: Any) -> bool:
    try:
        return bool(before == after)
    except (RuntimeError, ValueError, TypeError):
        return False
