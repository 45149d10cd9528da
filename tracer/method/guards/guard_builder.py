"""Build the nodes of a guard, from what a trace has read of an actor."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Sequence
from types import MemberDescriptorType
from typing import Any

import numpy as np
import torch

from ...errors import shorten
from ...values.actor_state import StateTensor
from ...values.heap.kinds import BOUND, held_by, is_foreign, is_plain
from ...values.heap.snapshot import MISSING
from ...values.specs import static_key
from ..purity.watch import EVERYTHING
from .inner_nodes import ContainerNode, FunctionNode, ObjectNode, group_of, keys_of, values_of
from .nodes import (
    GuardNode,
    IdentityNode,
    TensorNode,
    ValueNode,
    WeakNode,
    elements,
    members,
    show_value,
)

_MODULE_GROUPS = ("", "_modules", "_parameters", "_buffers")
_OF_MODULES = frozenset(vars(torch.nn.Module)) - {"forward", "__call__"}
"""Names that `torch.nn.Module` defines, and that nobody sets on an instance."""


class GuardBuilder:
    """Makes nodes of what a trace has read.

    Args:
        actor: the actor that was traced.
        reads: names of the attributes that were read, by object id.
        used: the tensors that the trace has used.
    """

    def __init__(self, actor: Any, reads: dict[int, set[str]], used: Sequence[StateTensor]) -> None:
        self._actor = actor
        self._reads = reads
        self._pinned = {id(t.slots[0].holder) for t in used}
        self._nodes: dict[int, GuardNode] = {}
        self._numbers: dict[int, int] = {}
        self._inherited: dict[type, set[str]] = {}

    def number(self, tensor: torch.Tensor) -> int:
        return self._numbers.setdefault(id(tensor), len(self._numbers))

    def node(self, value: Any) -> GuardNode:
        """The node of a value."""
        known = self._nodes.get(id(value))
        if known is not None:
            return known
        if isinstance(value, torch.Tensor):
            return TensorNode(self.number(value))
        if id(value) in self._reads:
            return self._object(value)
        if is_plain(value):
            return ValueNode(static_key, static_key(value), repr(value))
        if isinstance(value, weakref.ref):
            return WeakNode()
        if isinstance(value, (np.ndarray, bytearray)):
            return ValueNode(elements, elements(value), shorten(repr(value)))
        if isinstance(value, (set, frozenset)):
            return ValueNode(members, members(value), repr(value))
        if isinstance(value, (list, tuple, dict, collections.deque)):
            pinned = value if id(value) in self._pinned else None
            container_node = self._nodes[id(value)] = ContainerNode(
                type(value), keys_of(value), pinned
            )
            container_node.items = [self.node(item) for item in values_of(value)]
            return container_node
        if isinstance(value, BOUND):
            function_node = self._nodes[id(value)] = FunctionNode(type(value), show_value(value))
            function_node.held = {name: self.node(part) for name, part in held_by(value).items()}
            return function_node
        if isinstance(value, type):
            self._inherited.setdefault(value, set()).update(_names_of_data(value))
        return IdentityNode(value)

    def _object(self, obj: Any) -> GuardNode:
        object_node = self._nodes[id(obj)] = ObjectNode(type(obj), obj)
        names = set(self._reads[id(obj)])
        attributes = group_of(obj, "")
        groups = _MODULE_GROUPS if isinstance(obj, torch.nn.Module) else ("",)
        if EVERYTHING in names:
            names |= set(attributes)
            object_node.whole = tuple(attributes)
        if any(id(group_of(obj, name)) in self._pinned for name in groups):
            object_node.pinned = True
        names = {name for name in names if not name.startswith("__")}
        held_names: set[str] = set()
        for group in groups:
            space = group_of(obj, group)
            present = {n: self.node(space[n]) for n in sorted(names - held_names) if n in space}
            held_names |= present.keys()
            object_node.groups.append((group, present, set()))
        names -= held_names
        known = {name for name in names if hasattr(type(obj), name)}
        for group, _, absent in object_node.groups:
            # Only the object's own attributes hide those of its class.
            absent |= names - _OF_MODULES - (known if group else set())
        self._slots(obj, names, object_node)
        self._inherited.setdefault(type(obj), set()).update(names)
        return object_node

    def _slots(self, obj: Any, names: set[str], object_node: ObjectNode) -> None:
        for name in sorted(names):
            if isinstance(getattr(type(obj), name, None), MemberDescriptorType):
                value = getattr(obj, name, MISSING)
                object_node.slots[name] = None if value is MISSING else self.node(value)

    def classes(self) -> list[tuple[Any, str, GuardNode]]:
        """Nodes of the attributes that objects so far have from their classes, or lack there.

        Returns:
            (class, its name for messages, node) for each class.
        """
        names_of_class: dict[type, set[str]] = {}
        for cls, names in self._inherited.items():
            left = names | {"__call__"}
            for base in cls.__mro__[:-1]:
                names_of_class.setdefault(base, set()).update(left)
                left -= vars(base).keys()
        actor = type(self._actor).__mro__
        return [
            (cls, "" if cls in actor else cls.__name__, self._class(cls, names))
            for cls, names in names_of_class.items()
        ]

    def _class(self, cls: type, names: set[str]) -> GuardNode:
        space = vars(cls)
        own = not is_foreign(cls)
        present: dict[str, GuardNode] = {
            name: self.node(space[name])
            if own and _is_data(space[name])
            else IdentityNode(space[name])
            for name in sorted(names)
            if name in space
        }
        return ObjectNode(type(cls), cls, groups=[("", present, names - present.keys())])


def _names_of_data(cls: type) -> set[str]:
    """The names of a class's plain data, which it may be asked for without a note of any read."""
    own = [base for base in cls.__mro__ if not is_foreign(base)]
    attributes = [item for base in own for item in vars(base).items()]
    return {name for name, value in attributes if not name.startswith("__") and _is_data(value)}


def _is_data(value: Any) -> bool:
    """True if an attribute of a class is plain data: numbers, words, and containers of them."""
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(map(_is_data, value))
    if isinstance(value, dict):
        return all(map(_is_data, value.values()))
    return is_plain(value)
