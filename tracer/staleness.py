"""The guard of a trace: has the actor changed in a way that the trace did not foresee?

Tracing bakes in what Python code reads: flags, sizes, which submodule comes next. The guard
compares exactly the attributes that were read. It runs before every execution, so it is a flat
list of checks that spend their time in C: one comparison of tuples for each object.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .fingerprint import MISSING
from .interface import Guard
from .lifting import SCALARS, ActorState, StateTensor
from .surroundings import is_foreign
from .watch import EVERYTHING

_AGAIN = "trace the step again (lower and compile it anew) to use the actor as it is now"

_MANY = 10_000
"""A larger container is compared by identity alone."""

_Check = tuple[
    dict[str, Any], Callable[[dict[str, Any]], Any], tuple[Any, ...], tuple[str, ...], str
]


@dataclass(frozen=True)
class _Inherited:
    """Reads attributes that an object's class had when it was traced: the object's own first."""

    names: tuple[str, ...]
    space: Mapping[str, Any]

    def __call__(self, attributes: dict[str, Any]) -> tuple[Any, ...]:
        space = self.space
        return tuple(
            [attributes[n] if n in attributes else space.get(n, MISSING) for n in self.names]
        )


_TensorCheck = tuple[Any, Any, torch.Size, torch.dtype, bool, bool]


def build_guard(
    state: ActorState, reads: dict[int, set[str]], used: Iterable[StateTensor], who: str
) -> Guard | None:
    """A guard over the attributes `reads` (by object id) and the tensors `used`.

    It is called with the actor as it was traced: attributes at their own values.

    Args:
        who: the actor's class, for the message.

    Returns:
        None if the trace relied on nothing.
    """
    checks = [c for obj, path in state.objects for c in _object_checks(obj, path, reads[id(obj)])]
    tensors = list(used)
    ties = [t for t in tensors if len(t.slots) > 1]
    plain = [_tensor_check(t) for t in tensors]
    paths = [t.path for t in tensors]
    if not checks and not plain:
        return None

    def guard() -> str | None:
        try:
            for attributes, getter, expected, _, _ in checks:
                if getter(attributes) != expected:
                    return _explain(checks, who)
            for holder, key, shape, dtype, flag, dense in plain:
                tensor = holder[key]
                if (
                    tensor.requires_grad is not flag
                    or tensor.dtype is not dtype
                    or tensor.shape != shape
                    or tensor.is_contiguous() is not dense
                    or (flag and (tensor._backward_hooks or tensor._post_accumulate_grad_hooks))
                ):
                    return _explain_tensor(holder, key, paths[_index(plain, holder, key)], who)
            for tied in ties:
                first = tied.slots[0].get()
                if any(slot.get() is not first for slot in tied.slots[1:]):
                    names = " and ".join(f"'{slot.path}'" for slot in tied.slots)
                    return f"{who}: {names} were one tensor when it was traced; {_AGAIN}"
        except (LookupError, AttributeError, TypeError, ValueError, RuntimeError):
            return _explain(checks, who)
        return None

    return guard


def _tensor_check(tensor: StateTensor) -> Any:
    slot, now = tensor.slots[0], tensor.tensor
    holder, key = slot.holder, slot.key
    if slot.within:
        holder, key = holder[key], slot.within[0]
        for index in slot.within[1:]:
            holder, key = holder[key], index
    return (holder, key, now.shape, now.dtype, now.requires_grad, now.is_contiguous())


def _index(plain: list[Any], holder: Any, key: Any) -> int:
    return next(i for i, c in enumerate(plain) if c[0] is holder and c[1] == key)


def _object_checks(obj: Any, path: str, names: set[str]) -> list[_Check]:
    """One check for each dict that holds attributes of an object that were read."""
    attributes = vars(obj) if hasattr(obj, "__dict__") else {}
    if EVERYTHING in names:
        names = set(attributes)
    groups: list[tuple[dict[str, Any], list[str]]] = [(attributes, [])]
    if isinstance(obj, torch.nn.Module):
        groups += [(attributes[d], []) for d in ("_modules", "_parameters", "_buffers")]
    for name in sorted(names):
        for values, keys in groups:
            if name in values:
                keys.append(name)
                break
    found = [c for values, keys in groups for c in _dict_checks(values, keys, path)]
    own = names.difference(*(keys for _, keys in groups))
    return found + [c for cls in type(obj).__mro__ for c in _class_checks(cls, own, obj, path)]


def _class_checks(cls: type, names: set[str], obj: Any, path: str) -> list[_Check]:
    """A check of the data that an object has by a class that the user wrote; takes its names."""
    if is_foreign(cls):
        return []
    space = vars(cls)
    mine = tuple(name for name in sorted(names) if name in space and _is_data(space[name]))
    names.difference_update(space)
    if not mine or not hasattr(obj, "__dict__"):
        return []
    return [
        (vars(obj), _Inherited(mine, space), tuple(_frozen(space[n]) for n in mine), mine, path)
    ]


def _is_data(value: Any) -> bool:
    """Whether an attribute of a class is plain data: numbers, words, and lists of them."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_data, value))
    return isinstance(value, SCALARS) and not isinstance(value, type)


def _dict_checks(values: dict[str, Any], keys: list[str], path: str) -> list[_Check]:
    found: list[_Check] = []
    names = []
    for key in keys:
        value = values[key]
        if isinstance(value, torch.Tensor):
            continue  # state: looked up live, and checked as a tensor
        if _is_array(value) or (isinstance(value, (dict, list, tuple)) and _has_tensor(value)):
            found.extend(_nested_checks(values, key, value, path))
        else:
            names.append(key)
    if len(names) == 1:
        names *= 2  # so that itemgetter gives a tuple
    if names:
        expected = tuple(_frozen(values[name]) for name in names)
        found.append((values, operator.itemgetter(*names), expected, tuple(names), path))
    return found


def _nested_checks(values: dict[str, Any], key: str, value: Any, path: str) -> list[_Check]:
    """Checks of a container with tensors, or of an array: structure, and all that is baked in."""

    def shape_of(attributes: dict[str, Any]) -> tuple[Any, ...]:
        return (_skeleton(attributes[key]),)

    return [(values, shape_of, (_skeleton(value),), (key,), path)]


def _frozen(value: Any) -> Any:
    """A copy that later changes of lists and dicts do not reach; objects stay themselves."""
    if isinstance(value, (list, dict)) and len(value) > _MANY:
        return value
    if isinstance(value, list):
        return [_frozen(v) for v in value]
    if isinstance(value, (set, collections.deque)):
        return value.copy()
    if isinstance(value, dict):
        return {k: _frozen(v) for k, v in value.items()}
    return value


def _is_array(value: Any) -> bool:
    """Whether a value is a NumPy array (which this package may not be able to import)."""
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes") and value.ndim > 0


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return isinstance(value, torch.Tensor)
    return any(map(_has_tensor, value))


def _skeleton(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return "tensor"
    if _is_array(value):
        return (value.dtype, value.shape, value.tobytes() if value.nbytes <= _MANY else id(value))
    if isinstance(value, (list, tuple)):
        return [_skeleton(v) for v in value]
    if isinstance(value, dict):
        return {k: _skeleton(v) for k, v in value.items()}
    return value


def _explain(checks: list[_Check], who: str) -> str:
    for attributes, getter, expected, names, path in checks:
        for name in names:
            if name not in attributes and not isinstance(getter, _Inherited):
                return f"{who} has lost the attribute '{_join(path, name)}'; {_AGAIN}"
        for name, before, after in zip(names, expected, getter(attributes), strict=True):
            if not _equal(before, after):
                where, before, after = _pinpoint(_join(path, name), before, after)
                return (
                    f"{who}: '{where}' was {_short(before)} when it was traced and is "
                    f"{_short(after)} now; {_AGAIN}"
                )
    return f"{who} has changed since it was traced; {_AGAIN}"


def _pinpoint(path: str, before: Any, after: Any) -> tuple[str, Any, Any]:
    """The entry that differs, of two dicts with the same keys."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        for key in before:
            if not _equal(before[key], after[key]):
                path = path.removesuffix("_modules").removesuffix(".")
                return _pinpoint(_join(path, str(key)), before[key], after[key])
    return path, before, after


def _equal(before: Any, after: Any) -> bool:
    if before is after:
        return True
    try:
        return bool(before == after)
    except (RuntimeError, ValueError, TypeError):
        return False


def _explain_tensor(holder: Any, key: Any, path: str, who: str) -> str:
    tensor = holder[key]
    if tensor.requires_grad and (tensor._backward_hooks or tensor._post_accumulate_grad_hooks):
        return (
            f"{who}: '{path}' has a gradient hook now, which a traced step does not call; {_AGAIN}"
        )
    return (
        f"{who}: shape, dtype, layout or requires_grad of '{path}' has changed since it was "
        f"traced (now {tensor.dtype}, {tuple(tensor.shape)}, "
        f"requires_grad={tensor.requires_grad}); {_AGAIN}"
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
