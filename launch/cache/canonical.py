"""The text of options, equal for equal options in all processes.

Functions of scripts have no text, for other processes may mean others by their names.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType
from typing import Any

from ...ir.location import Location

_PACKAGE = __name__.partition(".")[0]
_PLAIN = (bool, int, float, str, bytes, type(None))


class Unkeyable(Exception):
    """A value has no text that other processes share; the message says which."""


def canonical(value: Any) -> str:
    """The text of an option.

    Raises:
        Unkeyable: it has none.
    """
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{_name(type(value))}.{value.name}"
    if isinstance(value, PurePath):
        return f"path {str(value)!r}"
    if isinstance(value, Location):
        return "a line"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(map(canonical, value))})"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}({', '.join(sorted(map(canonical, value)))})"
    if isinstance(value, Mapping):
        pairs = sorted((canonical(key), canonical(item)) for key, item in value.items())
        return f"{{{', '.join(f'{key}: {item}' for key, item in pairs)}}}"
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        return f"partial({', '.join(map(canonical, parts))})"
    if isinstance(value, type):
        return _name(value)
    if isinstance(value, (FunctionType, BuiltinFunctionType)):
        return _function(value)
    if is_dataclass(value):
        texts = (f"{field.name}={canonical(getattr(value, field.name))}" for field in fields(value))
        return f"{_name(type(value))}({', '.join(texts)})"
    raise Unkeyable(f"a value of type {type(value).__qualname__} has no text of its own")


def _function(function: Any) -> str:
    """The name of a function of cg, which the version of cg says all about.

    Raises:
        Unkeyable: it is another function, or has been made in a call.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    if not name.startswith(f"{_PACKAGE}.") or "<" in name or getattr(function, "__closure__", None):
        raise Unkeyable(f"{name} is a function that is not of cg")
    return name


def _name(cls: type) -> str:
    """The name of a class of cg.

    Raises:
        Unkeyable: it is another class.
    """
    if cls.__module__.partition(".")[0] not in (_PACKAGE, "builtins") or "<" in cls.__qualname__:
        raise Unkeyable(f"{cls.__module__}.{cls.__qualname__} is a class that is not of cg")
    return f"{cls.__module__}.{cls.__qualname__}"
