"""Sort Python values: plain data, objects whose attributes are followed, values that hold state."""

from __future__ import annotations

import argparse
import array
import collections
import collections.abc
import enum
import functools
import inspect
import random
import sys
import types
from collections.abc import Iterable
from types import FunctionType
from typing import Any

import numpy as np
import torch

from ...source import is_installed

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
"""Types of plain data: type and value say everything about such an object."""

TRAINERS: tuple[type, ...] = (
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.optim.lr_scheduler.ReduceLROnPlateau,
    torch.amp.GradScaler,
)
"""Objects that work on gradients; a method that touches one is called, and not traced."""

CONTAINERS = (dict, list, set, collections.deque)
"""Containers that can change."""

_HOLDERS: tuple[type, ...] = (
    types.SimpleNamespace,
    argparse.Namespace,
    collections.ChainMap,
    collections.UserDict,
    collections.UserList,
)
"""Classes of the standard library whose objects only hold other values."""

BOUND: tuple[type, ...] = (types.MethodType, functools.partial)
"""Functions that hold values: a bound method its object, a partial function its arguments."""

_STATEFUL: tuple[type, ...] = (
    np.ndarray,
    np.random.Generator,
    np.random.RandomState,
    random.Random,
    torch.Generator,
    bytearray,
    array.array,
)
"""Values that change in place, and that are neither containers nor objects of the user's."""

_LARGE = 1 << 20
"""An array with more bytes is neither copied nor compared."""

_PACKAGE = __name__.partition(".")[0]
_OWN_ROOMS = tuple(
    f"{__name__.rpartition('.tracer.')[0]}.{room}."
    for room in ("ir", "tracer", "backends", "launch")
)


def is_plain(value: Any) -> bool:
    """True if a value is plain data, and no class."""
    return isinstance(value, SCALARS) and not isinstance(value, type)


def is_walked(value: Any) -> bool:
    """True if an object's attributes count as state of whatever holds the object."""
    if isinstance(value, (torch.nn.Module, *_HOLDERS)):
        return True
    return isinstance(getattr(value, "__dict__", None), dict) and is_of_model(value)


def is_of_model(value: Any) -> bool:
    """True if an object is of a class that the user, or a library of models, has written."""
    module = type(value).__module__ + "."
    root = module.partition(".")[0]
    return (
        root not in ("torch", "numpy")
        and (root not in sys.stdlib_module_names or root == "__main__")
        and not module.startswith(_OWN_ROOMS)
    )


def is_foreign(cls: type) -> bool:
    """True if a class belongs to an installed package, or to Python itself."""
    root = cls.__module__.partition(".")[0]
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
    return root in ("torch", "numpy", _PACKAGE) or (
        root != "__main__" and (root in sys.stdlib_module_names or is_installed(file))
    )


def is_stateful(value: Any) -> bool:
    """True if a value is an array or a generator that is small enough to be copied."""
    if isinstance(value, np.ndarray):
        return value.nbytes <= _LARGE
    return isinstance(value, _STATEFUL)


def is_used_up(value: Any) -> bool:
    """True if a value changes by being used: an iterator, a generator, a file."""
    return isinstance(value, collections.abc.Iterator)


def is_cache(value: Any) -> bool:
    """True if a function remembers results, as by `functools.lru_cache`.

    Attributes are read without running code of the value: a name that a module imports may stand
    for a library that is not installed, and raise an error at each read.
    """
    if not callable(value) or (type(value) is FunctionType and "cache_clear" not in vars(value)):
        return False  # nearly all values, which a look at their classes would take long for
    return inspect.isroutine(
        inspect.getattr_static(value, "cache_clear", None)
    ) and inspect.isroutine(inspect.getattr_static(value, "cache_info", None))


def held_by(function: Any) -> dict[str, Any]:
    """The values that a function of `BOUND` holds, by the names of its attributes."""
    is_method = isinstance(function, types.MethodType)
    names = ("__func__", "__self__") if is_method else ("func", "args", "keywords")
    return {name: getattr(function, name) for name in names}


def has_slots(value: Any) -> bool:
    """True if a value keeps its attributes in slots, and has no `__dict__`."""
    return not hasattr(value, "__dict__") and bool(_slot_names(type(value)))


def slots_of(value: Any) -> dict[str, Any]:
    """The attributes that a value keeps in slots."""
    return {name: getattr(value, name) for name in _slot_names(type(value)) if hasattr(value, name)}


def _slot_names(cls: type) -> list[str]:
    return [name for base in cls.__mro__ for name in _listed(vars(base).get("__slots__", ()))]


def _listed(slots: Any) -> Iterable[str]:
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return [name for name in names if not name.startswith("__")]


def items_of(container: Any) -> list[tuple[Any, Any]]:
    """The items of a container, each with its key or index."""
    return list(container.items() if isinstance(container, dict) else enumerate(container))


def join(path: str, key: object) -> str:
    """The path of an item, by its key and the path of what holds it."""
    return f"{path}.{key}" if path else str(key)
