"""Snapshots of Python state: shallow copies of what can change, to name changes and undo them.

No tensor is copied. Comparison goes by identity, and for plain data by value. A snapshot covers
containers, attributes of classes, variables, arrays, generators and objects with slots; a
`ValueKind` says how to copy each and how to put a copy back.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import is_
from types import CellType
from typing import Any

import numpy as np
import torch

from ...errors import shorten
from .kinds import CONTAINERS, SCALARS, has_slots, join, slots_of


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()
"""Stands for the value of a key that is not there."""


@dataclass(frozen=True, eq=False)
class ModuleNames:
    """Some names of a module, which may be bound again."""

    space: dict[str, Any]
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False, slots=True)
class StateChange:
    """One difference between a snapshot and a later moment.

    Attributes:
        holder: the container, class, names, variable, array or object that changed.
        key: the key, index or name; None where the holder changed as a whole.
        path: in words, from where the walk began: `hist` or `blocks.0.step`.
        before, after: the values; `MISSING` where there was, or is, none. For a holder as a whole,
            copies of its contents.
    """

    holder: Any
    key: Any
    path: str
    before: Any
    after: Any

    def put(self, content: Any) -> None:
        """Put a content in the changed place: `before` undoes the change, `after` repeats it."""
        if self.key is None:
            _kind_of(self.holder).put(self.holder, content)
        else:
            _put_part(self.holder, self.key, content)

    def words(self) -> str:
        """The change in words, such as `from 1 to 2`."""
        return f"from {self._show(self.before)} to {self._show(self.after)}"

    def _show(self, content: Any) -> str:
        if self.key is None and isinstance(self.holder, CONTAINERS):
            return f"a {type(self.holder).__name__} of {len(content)}"
        return show(content)

    def watch(self) -> Callable[[], bool]:
        """Return a function that says whether the place has changed since this call.

        If the part was not there before, any change of the holder counts: the next part may come
        under another key, as in `table[len(table)] = x`.
        """
        now = Snapshot([(self.holder, "")])
        if self.key is None or self.before is MISSING:
            return lambda: bool(now.changes())
        return lambda: any(change.key in (self.key, None) for change in now.changes())


def show(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {value.dtype} {list(value.shape)}"
    if isinstance(value, (list, dict, set)):
        return f"a {type(value).__name__} of {len(value)}"
    return shorten(repr(value), 40)


class Snapshot:
    """Copies of what some values held at one moment.

    Args:
        held: the values, each with the path that messages name.
        caches: functions that remember results.
    """

    def __init__(self, held: Iterable[tuple[Any, str]], caches: Iterable[Any] = ()) -> None:
        self._copies = [_copied(value, path) for value, path in held]
        self._filled = [entry for entry in self._copies if entry[3] is not _NO_ITEMS]
        self._empty = [entry[0] for entry in self._copies if entry[3] is _NO_ITEMS]
        self._caches = [(cache, cache.cache_info().misses) for cache in caches]

    def changes(self) -> list[StateChange]:
        """Return the changes since the snapshot."""
        changes: list[StateChange] = []
        for value, path, kind, copy in self._to_compare():
            now = kind.read(value)
            if not kind.is_same(now, copy):
                changes += _differences(value, path, kind, copy, now)
        return changes

    def _to_compare(self) -> list[tuple[Any, str, ValueKind, Any]]:
        """The copies, without those of dictionaries that were empty, if all of them still are."""
        return self._copies if any(self._empty) else self._filled

    def filled_caches(self) -> list[Any]:
        """The functions that have remembered a result since the snapshot."""
        return [cache for cache, misses in self._caches if cache.cache_info().misses != misses]

    def clear_caches(self) -> None:
        """Empty the caches that have been filled: they may hold traced values."""
        for cache in self.filled_caches():
            cache.cache_clear()

    def restore(self) -> None:
        """Put everything back to what it held."""
        for value, _, kind, copy in self._to_compare():
            if not kind.is_same(kind.read(value), copy):
                kind.put(value, copy)
        self.clear_caches()


def _differences(
    value: Any, path: str, kind: ValueKind, copy: Any, now: Any
) -> Iterator[StateChange]:
    if not kind.has_parts or (isinstance(now, list) and len(now) != len(copy)):
        after = list(now) if now is value else now
        yield StateChange(value, None, path or "a container", copy, after)
    elif isinstance(now, dict):
        for key in dict.fromkeys((*copy, *now)):
            before, after = copy.get(key, MISSING), dict.get(now, key, MISSING)
            if not same(before, after):
                yield StateChange(value, key, join(path, key), before, after)
    else:
        for index, (before, after) in enumerate(zip(copy, now, strict=True)):
            if not same(before, after):
                yield StateChange(value, index, join(path, index), before, after)


@dataclass(frozen=True, eq=False)
class ValueKind:
    """Reads, restores and compares the contents of values of one kind.

    Attributes:
        read: gives what a value holds now: a container itself, or else a copy.
        put: puts a copy back into a value.
        is_same: compares what `read` gives with a copy.
        has_parts: whether `read` gives a dict or list whose parts are compared one by one.
    """

    read: Callable[[Any], Any]
    put: Callable[[Any, Any], None]
    is_same: Callable[[Any, Any], bool]
    has_parts: bool = False

    def copy(self, value: Any) -> Any:
        """Return a copy of what a value holds now."""
        content = self.read(value)
        if content is not value:
            return content
        if type(value) is dict:
            return dict(value)
        if isinstance(value, dict):  # whose own class may give something else for a key
            return {key: dict.__getitem__(value, key) for key in value}
        return list(value)


def same(before: Any, after: Any) -> bool:
    """True if two values are one object, or alike: equal plain data in containers of one kind."""
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, (tuple, list)):
        return len(before) == len(after) and all(map(same, before, after))
    if isinstance(before, dict):
        held = dict.__getitem__
        return before.keys() == after.keys() and all(
            same(held(before, key), held(after, key)) for key in before
        )
    return isinstance(before, SCALARS) and bool(before == after)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors are of one dtype and shape, and hold the same bits."""
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.reshape(-1).contiguous().view(torch.uint8)


def _identical(now: Any, copy: Any) -> bool:
    if len(now) != len(copy):
        return False
    if isinstance(now, dict):
        return all(map(is_, now, copy)) and all(map(is_, now.values(), copy.values()))
    return all(map(is_, now, copy))


def _equal(now: Any, copy: Any) -> bool:
    return bool(now == copy)


def _equal_arrays(now: np.ndarray[Any, Any], copy: np.ndarray[Any, Any]) -> bool:
    return now.dtype == copy.dtype and now.tobytes() == copy.tobytes()


def _equal_states(now: Any, copy: Any) -> bool:
    if isinstance(now, dict):
        return all(_equal_states(part, copy.get(key)) for key, part in now.items())
    return np.array_equal(now, copy) if isinstance(now, np.ndarray) else bool(now == copy)


def _itself(value: Any) -> Any:
    return value


def _put_items(container: Any, copy: Any) -> None:
    container[:] = copy


def _put_dict(container: Any, copy: Any) -> None:
    container.clear()
    container.update(copy)


def _put_deque(container: collections.deque[Any], copy: Any) -> None:
    container.clear()
    container.extend(copy)


def _read_names(value: ModuleNames) -> dict[str, Any]:
    return {name: value.space[name] for name in value.names if name in value.space}


def _put_names(value: ModuleNames, copy: dict[str, Any]) -> None:
    for name in value.names:
        _put_part(value, name, copy.get(name, MISSING))


def _read_class(cls: type) -> dict[str, Any]:
    return {k: v for k, v in vars(cls).items() if not k.startswith(("__", "_abc_"))}


def _put_class(cls: type, copy: dict[str, Any]) -> None:
    now = _read_class(cls)
    for name in {**copy, **now}:
        if now.get(name, MISSING) is not copy.get(name, MISSING):
            _put_part(cls, name, copy.get(name, MISSING))


def _parts_of(holder: Any) -> Any:
    if isinstance(holder, ModuleNames):
        return holder.space
    return vars(holder) if isinstance(holder, type) else holder


def _put_part(holder: Any, key: Any, content: Any) -> None:
    parts = _parts_of(holder)
    if isinstance(holder, type):
        if content is not MISSING:
            setattr(holder, key, content)
        elif key in parts:
            delattr(holder, key)
    elif content is MISSING:
        parts.pop(key, None)
    else:
        parts[key] = content


def read_cell(cell: CellType) -> Any:
    """Return the value of a closure's variable; `MISSING` if it is not bound."""
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return MISSING


def _put_cell(cell: CellType, content: Any) -> None:
    if content is MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = content


def _put_slots(value: Any, copy: dict[str, Any]) -> None:
    for name in slots_of(value).keys() - copy.keys():
        object.__delattr__(value, name)
    for name, content in copy.items():
        object.__setattr__(value, name, content)


def _put_array(value: np.ndarray[Any, Any], copy: np.ndarray[Any, Any]) -> None:
    if value.flags.writeable:
        value[...] = copy


def _put_bits(value: np.random.Generator, copy: Any) -> None:
    value.bit_generator.state = copy


def _torch_bits(value: torch.Generator) -> bytes:
    return value.get_state().numpy().tobytes()


def _put_torch_bits(value: torch.Generator, copy: bytes) -> None:
    value.set_state(torch.frombuffer(bytearray(copy), dtype=torch.uint8))


_SLOTS = ValueKind(slots_of, _put_slots, same)
_ELEMENTS = ValueKind(lambda value: value[:], _put_items, _equal)  # of a bytearray or an array
_KINDS: tuple[tuple[type, ValueKind], ...] = (
    (dict, ValueKind(_itself, _put_dict, _identical, has_parts=True)),
    (list, ValueKind(_itself, _put_items, _identical, has_parts=True)),
    (set, ValueKind(_itself, _put_dict, _identical)),
    (collections.deque, ValueKind(_itself, _put_deque, _identical)),
    (CellType, ValueKind(read_cell, _put_cell, same)),
    (ModuleNames, ValueKind(_read_names, _put_names, _identical, has_parts=True)),
    (type, ValueKind(_read_class, _put_class, _identical, has_parts=True)),
    (np.ndarray, ValueKind(np.ndarray.copy, _put_array, _equal_arrays)),
    (
        np.random.Generator,
        ValueKind(lambda value: value.bit_generator.state, _put_bits, _equal_states),
    ),
    (
        np.random.RandomState,
        ValueKind(
            partial(np.random.RandomState.get_state, legacy=False),
            np.random.RandomState.set_state,
            _equal_states,
        ),
    ),
    (random.Random, ValueKind(random.Random.getstate, random.Random.setstate, _equal)),
    (torch.Generator, ValueKind(_torch_bits, _put_torch_bits, _equal)),
)


def _kind_of(value: Any) -> ValueKind:
    for cls, kind in _KINDS:
        if isinstance(value, cls):
            return kind
    return _SLOTS if has_slots(value) else _ELEMENTS


_NO_ITEMS: dict[Any, Any] = {}
"""The copy of a dictionary that holds nothing, as most of a module's: never changed."""

_PLAIN: dict[type, ValueKind] = {
    dict: _kind_of({}),
    collections.OrderedDict: _kind_of({}),
    list: _kind_of([]),
}


def _copied(value: Any, path: str) -> tuple[Any, str, ValueKind, Any]:
    """A value with its path, its kind and a copy of what it holds."""
    kind = _PLAIN.get(type(value))
    if kind is None:
        kind = _kind_of(value)
        return value, path, kind, kind.copy(value)
    if type(value) is list:
        return value, path, kind, value[:]
    return value, path, kind, dict(value) if value else _NO_ITEMS


_RANDOM: Any = random
GENERATORS = (
    (_RANDOM._inst, "Python's random module"),
    (np.random.mtrand._rand, "NumPy's global generator"),
    (torch.default_generator, "torch's global generator (torch.manual_seed or set_rng_state)"),
)
"""The generators that everybody shares, with their names in messages."""
