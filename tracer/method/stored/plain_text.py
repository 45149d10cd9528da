"""Plain data as JSON: values that say everything by their type and contents.

A value is a list of a tag and its parts; a whole number is a reference to a tensor or a node.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.utils._pytree as pytree

Json: TypeAlias = Any
"""Numbers, strings, lists and dictionaries."""

Reference = Callable[[Any], int | None]
"""Gives the number of a tensor or a node; None for anything else."""

Referred = Callable[[int], Any]
"""Gives the tensor or the node of a number."""


class NotStorable(Exception):
    """Something has no text form; the message says what."""


class Damaged(Exception):
    """A text is not one that was written here."""


def nothing_referred(value: Any) -> int | None:
    """The `Reference` of values without references."""
    return None


def no_referent(number: int) -> Any:
    """The `Referred` of values without references."""
    raise Damaged(f"a reference {number} where there is none")


def encoded(value: Any, reference: Reference = nothing_referred) -> Json:
    """The JSON of a value.

    Raises:
        NotStorable: it is neither plain data, nor a container of such, nor refers to a tensor.
    """
    number = reference(value)
    if number is not None:
        return number
    kind = type(value)
    simple = _SIMPLE.get(kind)
    if simple is not None:
        return [simple[0], simple[1](value)]
    if kind is torch.Size:
        return ["size", *value]
    if kind is slice:
        return ["slice", *(encoded(v, reference) for v in (value.start, value.stop, value.step))]
    if kind is dict:
        pairs = ([encoded(k, reference), encoded(v, reference)] for k, v in value.items())
        return ["dict", *pairs]
    if isinstance(value, (tuple, list)):
        return [_sequence_tag(kind), *(encoded(item, reference) for item in value)]
    if isinstance(value, pytree.TreeSpec):
        form = _tree_form(value)
        if _tree(form) != value:
            raise NotStorable("a structure of arguments or results has no text")
        return ["tree", form]
    if isinstance(value, enum.Enum):
        return ["enum", kind.__module__, kind.__qualname__, _member(value)]
    raise NotStorable(f"a value of type {kind.__module__}.{kind.__qualname__} has no text")


def decoded(json: Json, referred: Referred = no_referent) -> Any:
    """The value of a JSON.

    Raises:
        Damaged: it is none that `encoded` gives.
    """
    if type(json) is int:
        return referred(json)
    if type(json) is not list or not json or type(json[0]) is not str:
        raise Damaged(f"a value is {str(json)[:80]}")
    tag, *parts = json
    read = _READ.get(tag)
    try:
        if read is not None:
            (part,) = parts
            return read(part)
        if tag == "size":
            return torch.Size(parts)
        if tag == "slice":
            return slice(*(decoded(part, referred) for part in parts))
        if tag == "dict":
            return {decoded(key, referred): decoded(item, referred) for key, item in parts}
        if tag == "tuple":
            return tuple([decoded(part, referred) for part in parts])
        if tag == "list":
            return [decoded(part, referred) for part in parts]
        if tag.startswith("return "):
            return _return_type(tag)([decoded(part, referred) for part in parts])
        if tag == "enum":
            return _enum_member(*parts)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise Damaged(f"a value of kind {tag}: {error}") from error
    raise Damaged(f"a value of the unknown kind {tag[:80]}")


def type_name(kind: type) -> str:
    """The name of a type of plain data.

    Raises:
        NotStorable: it is another type.
    """
    if kind in _TYPES:
        return _TYPES[kind]
    raise NotStorable(f"a type {kind.__module__}.{kind.__qualname__} has no text")


def type_named(name: str) -> type:
    """The type of plain data with a name.

    Raises:
        Damaged: there is none.
    """
    if name not in _NAMED_TYPES:
        raise Damaged(f"a type {name[:80]}")
    return _NAMED_TYPES[name]


def _torch_name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _of_torch(kind: type) -> Callable[[str], Any]:
    """Reads the name of one of torch's constants of a kind."""

    def read(name: str) -> Any:
        value = vars(torch).get(name)
        if type(value) is not kind:
            raise ValueError(name)
        return value

    return read


def _range(parts: list[int]) -> range:
    return range(*parts)


def _tree_form(spec: pytree.TreeSpec) -> Json:
    """The JSON of a structure of containers, whose classes pytree knows.

    Raises:
        NotStorable: no other process could find a class.
    """
    if spec.is_leaf():
        return []
    kind: Any = spec.type
    if (
        kind not in pytree.SUPPORTED_NODES
        or _loaded(kind.__module__, kind.__qualname__) is not kind
    ):
        raise NotStorable(f"a structure with a {kind.__module__}.{kind.__qualname__} has no text")
    children = map(_tree_form, spec.children())
    return [kind.__module__, kind.__qualname__, encoded(spec.context), *children]


def _tree(form: Json) -> pytree.TreeSpec:
    if not form:
        return _LEAF
    module, name, context, *children = form
    kind = _loaded(module, name)
    if kind not in pytree.SUPPORTED_NODES:
        raise ValueError(f"{module}.{name}")
    return pytree.TreeSpec(kind, decoded(context), [_tree(child) for child in children])


_LEAF = pytree.tree_structure(0)

_SIMPLE: dict[type, tuple[str, Callable[[Any], Any]]] = {
    type(None): ("none", lambda value: 0),
    bool: ("bool", lambda value: value),
    int: ("int", str),
    float: ("float", repr),
    complex: ("complex", repr),
    str: ("str", lambda value: value),
    bytes: ("bytes", bytes.hex),
    type(Ellipsis): ("ellipsis", lambda value: 0),
    range: ("range", lambda value: [value.start, value.stop, value.step]),
    torch.dtype: ("dtype", _torch_name),
    torch.layout: ("layout", _torch_name),
    torch.memory_format: ("memory format", _torch_name),
    torch.device: ("device", str),
}
_READ: dict[str, Callable[[Any], Any]] = {
    "none": lambda part: None,
    "bool": bool,
    "int": int,
    "float": float,
    "complex": complex,
    "str": str,
    "bytes": bytes.fromhex,
    "ellipsis": lambda part: Ellipsis,
    "range": _range,
    "dtype": _of_torch(torch.dtype),
    "layout": _of_torch(torch.layout),
    "memory format": _of_torch(torch.memory_format),
    "device": torch.device,
    "tree": _tree,
}

_TYPES: dict[type, str] = {
    **{kind: name for kind, (name, _) in _SIMPLE.items()},
    torch.Size: "size",
    tuple: "tuple",
    list: "list",
    slice: "slice",
    dict: "dict",
    torch.nn.Parameter: "parameter",
    torch.Tensor: "tensor",
}
_NAMED_TYPES = {name: kind for kind, name in _TYPES.items()}

_RETURN = "return "


def _sequence_tag(kind: type) -> str:
    if kind is tuple:
        return "tuple"
    if kind is list or kind.__name__ == "immutable_list":
        return "list"
    name = kind.__name__
    if vars(torch.return_types).get(name) is kind:
        return f"{_RETURN}{name}"
    raise NotStorable(f"a sequence of type {kind.__module__}.{kind.__qualname__} has no text")


def _return_type(tag: str) -> Any:
    kind = vars(torch.return_types).get(tag.removeprefix(_RETURN))
    if not (isinstance(kind, type) and issubclass(kind, tuple)):
        raise ValueError(tag)
    return kind


def _member(value: enum.Enum) -> str:
    kind = type(value)
    if _loaded(kind.__module__, kind.__qualname__) is not kind:
        raise NotStorable(f"a constant of {kind.__module__}.{kind.__qualname__} has no text")
    return value.name


def _enum_member(module: str, name: str, member: str) -> enum.Enum:
    kind = _loaded(module, name)
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise ValueError(f"{module}.{name}")
    return kind.__members__[member]


def _loaded(module: str, name: str) -> Any:
    """The object that a loaded module has by a name; None if there is none."""
    return vars(sys.modules.get(module, enum)).get(name)
