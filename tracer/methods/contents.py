"""State in attributes that is neither tensor nor container: arrays, generators, objects with slots.

A traced call that changes such a thing does so once, while it is traced. A copy from before says
what has changed, and puts it back.
"""

from __future__ import annotations

import array
import collections.abc
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_LARGE = 1 << 20
"""Bytes of an array from which on it is not copied, and not looked at."""


@dataclass(frozen=True)
class Kind:
    """How to copy what a value holds, and how to put that back."""

    copy: Callable[[Any], Any]
    put: Callable[[Any, Any], Any]


def slots_of(value: Any) -> dict[str, Any]:
    """The attributes that a value keeps in slots."""
    names = (name for cls in type(value).__mro__ for name in _names(vars(cls).get("__slots__", ())))
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _names(slots: Any) -> Iterable[str]:
    listed = (slots,) if isinstance(slots, str) else tuple(slots)
    return [name for name in listed if not name.startswith("__")]


def _put_slots(value: Any, copy: dict[str, Any]) -> None:
    for name in slots_of(value).keys() - copy.keys():
        object.__delattr__(value, name)
    for name, content in copy.items():
        object.__setattr__(value, name, content)


def _put_elements(value: Any, copy: Any) -> None:
    value[:] = copy


def _put_array(value: np.ndarray[Any, Any], copy: np.ndarray[Any, Any]) -> None:
    if value.flags.writeable:
        value[...] = copy


def _put_bits(value: np.random.Generator, copy: Any) -> None:
    value.bit_generator.state = copy


def _torch_bits(value: torch.Generator) -> bytes:
    return value.get_state().numpy().tobytes()


def _put_torch_bits(value: torch.Generator, copy: bytes) -> None:
    value.set_state(torch.frombuffer(bytearray(copy), dtype=torch.uint8))


_SLOTS = Kind(slots_of, _put_slots)
_KINDS: tuple[tuple[type, Kind], ...] = (
    (np.ndarray, Kind(lambda value: value.copy(), _put_array)),
    (np.random.Generator, Kind(lambda value: value.bit_generator.state, _put_bits)),
    (
        np.random.RandomState,
        Kind(lambda value: value.get_state(legacy=False), np.random.RandomState.set_state),
    ),
    (random.Random, Kind(random.Random.getstate, random.Random.setstate)),
    (torch.Generator, Kind(_torch_bits, _put_torch_bits)),
    (bytearray, Kind(bytes, _put_elements)),
    (array.array, Kind(lambda value: value[:], _put_elements)),
)


def kind_of(value: Any) -> Kind | None:
    """How to copy what `value` holds; None where there is nothing to copy."""
    for cls, kind in _KINDS:
        if isinstance(value, cls):
            return None if isinstance(value, np.ndarray) and value.nbytes > _LARGE else kind
    return None


def has_slots(value: Any) -> bool:
    """Whether a value keeps its attributes in slots, and has no `__dict__`."""
    return not hasattr(value, "__dict__") and any(
        _names(vars(cls).get("__slots__", ())) for cls in type(value).__mro__
    )


def is_used_up(value: Any) -> bool:
    """Whether a value changes by being used: an iterator, a generator, a file."""
    return isinstance(value, collections.abc.Iterator)


class Contents:
    """Copies of what some values hold at one moment.

    Args:
        values: each with the path that messages name.
    """

    def __init__(self, values: Iterable[tuple[Any, str]]) -> None:
        kinds = ((value, path, kind_of(value) or _SLOTS) for value, path in values)
        self._copies = [(value, path, kind, kind.copy(value)) for value, path, kind in kinds]

    def changed(self) -> list[str]:
        """The paths of what has changed since."""
        return [path for value, path, kind, copy in self._copies if not _equal(kind, value, copy)]

    def restore(self) -> None:
        """Put everything back to what it held."""
        for value, _, kind, copy in self._copies:
            if not _equal(kind, value, copy):
                kind.put(value, copy)


def _equal(kind: Kind, value: Any, copy: Any) -> bool:
    now = kind.copy(value)
    if isinstance(copy, np.ndarray):
        return bool(now.dtype == copy.dtype and now.tobytes() == copy.tobytes())
    if kind is _SLOTS:
        return copy.keys() == now.keys() and all(_alike(copy[k], now[k]) for k in copy)
    return repr(now) == repr(copy) if isinstance(copy, dict) else bool(now == copy)


def _alike(before: Any, after: Any) -> bool:
    plain = isinstance(before, (bool, int, float, complex, str, bytes))
    return before is after or (plain and type(before) is type(after) and bool(before == after))
