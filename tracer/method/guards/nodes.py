"""Leaves of a guard: values that a trace has read, to compare with what is there later.

A guard is a tree of nodes. A node keeps plain data by type and value, and everything else by
identity. `differ` compares thoroughly, path by path; `flatten` gives what is compared before every
execution.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, ClassVar

import numpy as np
import torch

from ...errors import Verbatim
from .flat import FlatValues

_FX = "torch.fx._symbolic_trace"
"""The module whose wrappers are on while torch.fx traces."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference of a value from what was traced: `path` was `before` and is `after`.

    `after` is `MISSING` where an attribute is no longer there.
    """

    path: str
    before: str
    after: Any


@dataclass(eq=False, slots=True)
class GuardComparison:
    """One thorough comparison: what has been met on the way.

    Attributes:
        tensors: the tensor that stands there now, with its path, by the number of its node.
        met: nodes and values that have been, or are being, compared, as pairs of `id`s.
    """

    tensors: dict[int, tuple[torch.Tensor, str]] = field(default_factory=dict)
    met: set[tuple[int, int]] = field(default_factory=set)


class GuardNode:
    """One value that a trace has read, in a tree of them.

    Attributes:
        has_children: whether other nodes stand for what it holds.
        may_move: whether another object may stand in its place, without a difference.
    """

    __slots__ = ()

    has_children: ClassVar[bool] = False
    may_move: ClassVar[bool] = False

    def differ(self, now: Any, path: str, met: GuardComparison) -> Difference | None:
        """The difference of the value that is there now; None if there is none."""
        raise NotImplementedError

    def flatten(self, now: Any, flat: FlatValues) -> None:
        """Add what is compared before every execution."""

    def show(self) -> str:
        """The value that was read, in words."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ValueNode(GuardNode):
    """A value that is compared by a key.

    Attributes:
        key_of: makes the key: `static_key`, `elements` of an array, or `members` of a set.
        key: the key of the value that was read.
        shown: that value in words.
    """

    key_of: Callable[[Any], Any]
    key: Any
    shown: str

    def differ(self, now: Any, path: str, met: GuardComparison) -> Difference | None:
        return None if self.key_of(now) == self.key else Difference(path, self.shown, now)

    def flatten(self, now: Any, flat: FlatValues) -> None:
        if self.key_of is elements:
            flat.digest(now, elements, self.key)
        elif isinstance(now, set):
            flat.digest(now, frozenset, self.key[1])

    def show(self) -> str:
        return self.shown


@dataclass(frozen=True, slots=True)
class IdentityNode(GuardNode):
    """An object that is compared as a whole: by identity, or by its own `==`."""

    value: Any

    def differ(self, now: Any, path: str, met: GuardComparison) -> Difference | None:
        if _traced_by_fx(now) is self.value:
            return None
        if type(now) is type(self.value) and _equal(self.value, now):
            return None
        return Difference(path, repr(self.value), now)

    def show(self) -> str:
        return repr(self.value)


@dataclass(frozen=True, slots=True)
class TensorNode(GuardNode):
    """A tensor of the actor's state: another one may have taken its place.

    `number` is the same for all places of a tied tensor.
    """

    number: int

    may_move: ClassVar[bool] = True

    def differ(self, now: Any, path: str, met: GuardComparison) -> Difference | None:
        if not isinstance(now, torch.Tensor):
            return Difference(path, "a tensor", now)
        known, where = met.tensors.setdefault(self.number, (now, path))
        if known is not now:
            return Difference(path, f"one tensor with '{where}'", Verbatim("another one"))
        return None

    def show(self) -> str:
        return "a tensor"


@dataclass(frozen=True, slots=True)
class WeakNode(GuardNode):
    """A weak reference; a module keeps some to its own parameters."""

    may_move: ClassVar[bool] = True

    def differ(self, now: Any, path: str, met: GuardComparison) -> Difference | None:
        return None if isinstance(now, weakref.ref) else Difference(path, "a reference", now)

    def show(self) -> str:
        return "a reference"


def elements(value: Any) -> Any:
    """The key of an array's elements; None if the value is no array."""
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


def members(value: Any) -> Any:
    """The key of a set's type and items; None if the value is no set."""
    return (type(value), frozenset(value)) if isinstance(value, (set, frozenset)) else None


def show_value(value: Any) -> str:
    """A value in words, even if its class cannot show it."""
    try:
        return repr(value)
    except Exception:  # from a `__repr__` of the user's
        return f"an object of class {type(value).__qualname__}"


def _traced_by_fx(value: Any) -> Any:
    """The function that a wrapper of torch.fx calls; any other value as it is.

    While torch.fx traces in one thread, `Module.__call__` is wrapped for all threads. The wrapper
    of a trace of operators calls what it wraps.
    """
    if isinstance(value, FunctionType) and value.__globals__.get("__name__") == _FX:
        return vars(value).get("__wrapped__", value)
    return value


def _equal(before: Any, after: Any) -> bool:
    try:
        return bool(before == after)
    except (RuntimeError, ValueError, TypeError):
        return False
