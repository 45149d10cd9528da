"""Specs of values: types of tensors, objects and static leaves, and pytrees of them.

A spec says everything that tracing may depend on. Two calls of one method with equal signatures
share one trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import SUPPORTED_NODES, TreeSpec

from ...ir.types import DType, ObjectType, Place, TensorType, ValueType


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor: element type, shape, and whether gradients flow through it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class ObjectSpec:
    """A Python object that is known only at run time."""


@dataclass(frozen=True, slots=True)
class Static:
    """A Python value that is part of the signature: it is the same in every execution.

    Values compare as `static_key` says, so `1`, `True` and `1.0` are three signatures.
    """

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and static_key(self.value) == static_key(other.value)

    def __hash__(self) -> int:
        return hash(static_key(self.value))


def static_key(value: Any) -> tuple[Any, ...]:
    """Key that equal static values have in common; hashable.

    Values compare with their types. A float compares by its digits: `-0.0` is not `0.0`, and
    `nan` is `nan`. A slice compares by its parts. A value that is not hashable compares by
    identity.
    """
    kind = type(value)
    if kind is float or kind is complex:
        return (kind, repr(value))
    if kind is slice:
        return (kind, *map(static_key, (value.start, value.stop, value.step)))
    try:
        hash(value)
    except TypeError:
        return (kind, id(value))
    return (kind, value)


Leaf: TypeAlias = TensorSpec | ObjectSpec | Static


@dataclass(frozen=True, slots=True)
class Tree:
    """A pytree of leaves: what a signature or the result of a function is made of."""

    leaves: tuple[Leaf, ...]
    spec: TreeSpec

    @property
    def values(self) -> tuple[int, ...]:
        """Indices of the leaves that are values (not static), in order."""
        return tuple(i for i, leaf in enumerate(self.leaves) if not isinstance(leaf, Static))

    def types(self) -> tuple[ValueType, ...]:
        """IR types, without places, of the leaves that are values."""
        return tuple(ir_type(self.leaves[i]) for i in self.values)

    def fill(self, values: Sequence[Any]) -> Any:
        """The pytree with `values` for the value leaves and the static leaves' own values."""
        return filler(self)(values)


Fill = Callable[[Sequence[Any]], Any]
"""Takes a value for each value leaf of a pytree, in order, and makes the pytree."""

_Make = Callable[[Iterator[Any]], Any]
"""Makes a part of the pytree; takes its values from an iterator over those that are left."""


def filler(tree: Tree) -> Fill:
    """Return a fast `tree.fill`, for repeated use.

    Containers are looked up once, here; `tree_unflatten` looks them up each time, in microseconds.
    """
    spec = tree.spec
    if spec.is_leaf() and not isinstance(tree.leaves[0], Static):
        return itemgetter(0)
    if not spec.is_leaf() and _holds_only_values(tree):
        unflatten, context = SUPPORTED_NODES[spec.type].unflatten_fn, spec.context
        return lambda values: unflatten(list(values), context)
    make = _maker(spec, iter(tree.leaves))
    return lambda values: make(iter(values))


def _holds_only_values(tree: Tree) -> bool:
    """True if nothing but values is in the outermost container."""
    return all(child.is_leaf() for child in tree.spec.children()) and not any(
        isinstance(leaf, Static) for leaf in tree.leaves
    )


def _maker(spec: TreeSpec, leaves: Iterator[Leaf]) -> _Make:
    if spec.is_leaf():
        leaf = next(leaves)
        if not isinstance(leaf, Static):
            return next
        value = leaf.value
        return lambda supply: value
    children = [_maker(child, leaves) for child in spec.children()]
    unflatten, context = SUPPORTED_NODES[spec.type].unflatten_fn, spec.context
    return lambda supply: unflatten([make(supply) for make in children], context)


def ir_type(leaf: Leaf, place: Place | None = None) -> ValueType:
    """The IR type of a value leaf.

    Raises:
        ValueError: the leaf is static, or the IR has no such element type.
    """
    match leaf:
        case TensorSpec(dtype, shape, _):
            return TensorType(ir_dtype(dtype), shape, place)
        case ObjectSpec():
            return ObjectType(place)
        case Static(value):
            raise ValueError(f"{value!r} is static and has no type in the IR")


def ir_dtype(dtype: torch.dtype) -> DType:
    """The IR's name of a torch element type.

    Raises:
        ValueError: the IR has none.
    """
    try:
        return _FROM_TORCH[dtype]
    except KeyError:
        raise ValueError(f"{dtype} is not supported in a step") from None


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch element type for the IR's name."""
    return _TO_TORCH[dtype]


_TO_TORCH: dict[DType, torch.dtype] = {dtype: getattr(torch, dtype.torch_name) for dtype in DType}
_FROM_TORCH = {torch_: ir for ir, torch_ in _TO_TORCH.items()}


def show_type(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """A dtype and a shape in words of torch: `float32[2,8]`."""
    return f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]"
