"""Inner nodes of a guard: containers with items, functions that hold values, objects."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...errors import Verbatim
from ...values.heap.kinds import held_by, is_plain, join
from ...values.heap.snapshot import MISSING
from ...values.specs import static_key
from .flat import FlatValues
from .nodes import (
    Difference,
    GuardComparison,
    GuardNode,
    TensorNode,
    ValueNode,
    WeakNode,
    show_value,
)

_FEW = 16
"""The items of a longer list are compared in one go."""


@dataclass(slots=True)
class ContainerNode(GuardNode):
    """A list, tuple, deque or dict, with its order.

    Attributes:
        kind: its class.
        keys: its keys or indices.
        pinned: the container itself, if a body looks tensors up in it.
        items: the nodes of what it holds.
    """

    has_children: ClassVar[bool] = True

    kind: type
    keys: list[Any]
    pinned: Any = None
    items: list[GuardNode] = field(default_factory=list)

    def differ(self, now: Any, path: str, met: GuardComparison) -> Difference | None:
        if type(now) is not self.kind or keys_of(now) != self.keys:
            return Difference(path, self.show(), now)
        if self.pinned is not None and now is not self.pinned:
            return Difference(path, f"one {self.kind.__name__} of tensors", Verbatim("another one"))
        if isinstance(now, dict):
            path = path.removesuffix("_modules").removesuffix(".")
        for key, node, value in zip(self.keys, self.items, values_of(now), strict=True):
            difference = _differ(node, value, join(path, key), met)
            if difference is not None:
                return difference
        return None

    def flatten(self, now: Any, flat: FlatValues) -> None:
        fixed = isinstance(now, tuple)
        if not fixed:
            flat.size(now)
        if isinstance(now, dict) and now:
            flat.many(now)
        many = len(now) > (0 if isinstance(now, dict) else _FEW)
        if many and not fixed and not any(node.may_move for node in self.items):
            fixed = True
            flat.many(values_of(now))
        for key, node, value in zip(self.keys, self.items, values_of(now), strict=True):
            _flatten_entry(node, now, key, value, flat, fixed)

    def show(self) -> str:
        shown = [item.show() for item in self.items[:9]]
        more = ["..."] if len(self.items) > 9 else []
        if issubclass(self.kind, dict):
            pairs = [f"{key!r}: {text}" for key, text in zip(self.keys, shown, strict=False)]
            return "{" + ", ".join(pairs + more) + "}"
        inner = ", ".join(shown + more)
        if self.kind in (list, tuple):
            return f"[{inner}]" if self.kind is list else f"({inner})"
        return f"{self.kind.__name__}([{inner}])"


def keys_of(container: Any) -> list[Any]:
    """The keys or indices of a container, in order."""
    return list(container) if isinstance(container, dict) else list(range(len(container)))


def values_of(container: Any) -> Iterable[Any]:
    """The items of a container in order, past what its class may do on access."""
    return dict.values(container) if isinstance(container, dict) else container


@dataclass(slots=True)
class FunctionNode(GuardNode):
    """A bound method or a partial function.

    Attributes:
        kind: its class.
        shown: the function in words.
        held: the nodes of what it holds, by the names of its attributes.
    """

    has_children: ClassVar[bool] = True

    kind: type
    shown: str
    held: dict[str, GuardNode] = field(default_factory=dict)

    def differ(self, now: Any, path: str, met: GuardComparison) -> Difference | None:
        if type(now) is not self.kind:
            return Difference(path, self.shown, now)
        return _differ_in(held_by(now), self.held, path, met)

    def flatten(self, now: Any, flat: FlatValues) -> None:
        for name, value in held_by(now).items():  # they stay, as long as the function does
            if not isinstance(self.held[name], TensorNode):
                _flatten_entry(self.held[name], None, name, value, flat, True)

    def show(self) -> str:
        return self.shown


@dataclass(slots=True)
class ObjectNode(GuardNode):
    """A watched object, or a class, by the attributes that were read.

    Attributes:
        kind: its class.
        original: the object.
        pinned: whether a body looks tensors up among its attributes.
        groups: for each of its dicts: its name, nodes of what was read, and names that it lacked.
        slots: nodes of attributes without a dict; None for an attribute that was not there.
        whole: the names of all attributes, if code has looked at all of them at once.
    """

    has_children: ClassVar[bool] = True

    kind: type
    original: Any
    pinned: bool = False
    groups: list[tuple[str, dict[str, GuardNode], set[str]]] = field(default_factory=list)
    slots: dict[str, GuardNode | None] = field(default_factory=dict)
    whole: tuple[str, ...] | None = None

    def differ(self, now: Any, path: str, met: GuardComparison) -> Difference | None:
        if type(now) is not self.kind and now is self.original:
            after = Verbatim(f"of class {type(now).__qualname__}")
            return Difference(path, f"of class {self.kind.__qualname__}", after)
        if type(now) is not self.kind or (self.pinned and now is not self.original):
            return Difference(path, self.show(), now)
        for name, present, absent in self.groups:
            space = group_of(now, name)
            difference = _differ_in(space, present, path, met) or self._shadowed(
                space, absent, path
            )
            if difference is not None:
                return difference
        if self.whole is not None and tuple(group_of(now, "")) != self.whole:
            return Difference(path, f"an object with {', '.join(self.whole)}", now)
        for name, node in self.slots.items():
            value = getattr(now, name, MISSING)
            if node is None or value is MISSING:
                if (node is None) != (value is MISSING):
                    before = "not there" if node is None else node.show()
                    return Difference(join(path, name), before, value)
                continue
            difference = _differ(node, value, join(path, name), met)
            if difference is not None:
                return difference
        return None

    def _shadowed(self, space: Any, absent: set[str], path: str) -> Difference | None:
        """The difference of an attribute that the object has gained.

        One that equals the attribute of the class makes none, and is compared in later checks.
        """
        for key in [key for key in absent if key in space]:
            inherited = inspect.getattr_static(self.kind, key, MISSING)
            if not is_plain(inherited) or static_key(inherited) != static_key(space[key]):
                before = "not there" if inherited is MISSING else repr(inherited)
                return Difference(join(path, key), before, space[key])
            absent.remove(key)
            present = next(present for name, present, _ in self.groups if not name)
            present[key] = ValueNode(static_key, static_key(inherited), repr(inherited))
        return None

    def flatten(self, now: Any, flat: FlatValues) -> None:
        if not isinstance(now, type):
            flat.of_type(now, self.kind)
        for name, present, absent in self.groups:
            space = group_of(now, name)
            if name and present:
                flat.entry(group_of(now, ""), name, space)
            for key, node in present.items():
                _flatten_entry(node, space, key, space[key], flat, False)
            for key in absent:
                flat.absent(space, key)
        if self.whole is not None:
            attributes = group_of(now, "")
            flat.size(attributes)
            flat.many(attributes)
        for name, slot in self.slots.items():
            value = getattr(now, name, MISSING)
            flat.slot(now, name, value)
            if slot is not None:
                slot.flatten(value, flat)

    def show(self) -> str:
        return show_value(self.original)


def group_of(obj: Any, name: str) -> Any:
    """The attributes of an object, or its dict with this name, such as `_parameters`."""
    attributes = vars(obj) if hasattr(obj, "__dict__") else {}
    return attributes[name] if name else attributes


def _differ_in(
    space: Any,
    present: dict[str, GuardNode],
    path: str,
    met: GuardComparison,
) -> Difference | None:
    for key, node in present.items():
        if key not in space:
            return Difference(join(path, key), node.show(), MISSING)
        difference = _differ(node, space[key], join(path, key), met)
        if difference is not None:
            return difference
    return None


def _differ(node: GuardNode, now: Any, path: str, met: GuardComparison) -> Difference | None:
    if node.has_children:
        pair = (id(node), id(now))
        if pair in met.met:
            return None
        met.met.add(pair)
    return node.differ(now, path, met)


def _flatten_entry(
    node: GuardNode, holder: Any, key: Any, value: Any, flat: FlatValues, fixed: bool
) -> None:
    """Add what is at one place; `fixed` if nothing else can get there unnoticed."""
    if isinstance(node, TensorNode):
        flat.tensors.setdefault(node.number, []).append((holder, key))
    elif not isinstance(node, WeakNode) and not fixed:
        flat.entry(holder, key, value)
    if node.has_children:
        if (id(node), id(value)) in flat.met:
            return
        flat.met.add((id(node), id(value)))
    node.flatten(value, flat)
