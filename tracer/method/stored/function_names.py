"""Names of torch's functions, by which two processes mean the same function.

A name is looked up in modules of torch that are loaded, and only compared with what Python calls.
"""

from __future__ import annotations

import functools
import inspect
import sys
from types import FunctionType
from typing import Any

import torch

from ...values.operators import plain_operator
from ..reuse.saving_functions import SavingMark
from .plain_text import Damaged, NotStorable

_SPACES = (
    "torch",
    "torch:Tensor",
    "torch._C:TensorBase",
    "torch._C._nn",
    "torch._C._linalg",
    "torch._C._special",
    "torch._C._fft",
    "torch._C._sparse",
    "torch._C._nested",
    "torch.nn.functional",
    "torch.functional",
    "torch._C:_VariableFunctions",
    "torch._C",
    "torch.autograd",
)
"""Where functions without a module of their own are looked for, in this order."""

_GET = ".__get__"
_MARK = "cg:"


def name_of(function: Any) -> str:
    """The name of a torch function.

    Raises:
        NotStorable: no other process could find it by a name.
    """
    if isinstance(function, torch._ops.OpOverload):
        return operator_name(function)
    if isinstance(function, torch._ops.OpOverloadPacket):
        operator = plain_operator(function)
        if operator is not None:
            return f"{_PACKET}{operator_name(operator)}"
    if isinstance(function, SavingMark):
        return f"{_MARK}{function.mark}"
    held = getattr(function, "__self__", None)
    if type(function).__name__ == "method-wrapper" and function.__name__ == "__get__":
        name = f"{_searched(held)}{_GET}"
    elif isinstance(function, FunctionType):
        name = f"{function.__module__}:{function.__qualname__}"
        if _object_named(name) is not function:
            name = _searched(function)
    else:
        name = _searched(function)
    if _object_named(name) != function:
        raise NotStorable(f"{function!r} has no name")
    return name


def function_named(name: str) -> Any:
    """The torch function with a name.

    Raises:
        Damaged: there is none.
    """
    if name.startswith(_PACKET):
        return operator_named(name.removeprefix(_PACKET)).overloadpacket
    if name.startswith(_OPERATOR):
        return operator_named(name)
    return _plain_function(name)


@functools.lru_cache(maxsize=4096)
def _plain_function(name: str) -> Any:
    if name.startswith(_MARK):
        return SavingMark(name.removeprefix(_MARK))
    function = _object_named(name)
    if function is None:
        raise Damaged(f"torch has no function {name[:80]}")
    return function


_OPERATOR = "torch.ops."
_PACKET = "packet "
_NAMESPACES = ("aten", "prims", "cg", "flex_lib")
"""Namespaces of torch's operators and cg's own, whose versions say all about them."""


def operator_name(operator: torch._ops.OpOverload) -> str:
    """The name of an operator; one of another library has its schema behind it.

    Raises:
        NotStorable: it is of another library, and graphs do not have its calls as they are.
    """
    name = f"{_OPERATOR}{operator}"
    if operator.namespace not in _NAMESPACES:
        if plain_operator(operator) is None:
            raise NotStorable(
                f"the operator {operator} is not of torch, and may be more than a node"
            )
        name = f"{name} {operator._schema}"
    if operator_named(name) is not operator:
        raise NotStorable(f"the operator {operator} cannot be found by its name")
    return name


def operator_named(name: str) -> torch._ops.OpOverload:
    """The operator with a name.

    Raises:
        Damaged: there is none; or it is of another library, and has become another.
    """
    path, _, schema = name.removeprefix(_OPERATOR).partition(" ")
    if path.startswith(tuple(f"{space}." for space in _NAMESPACES)):
        return _known_operator(path)
    overload = _operator_at(path)  # which may be another each time
    if plain_operator(overload) is None or str(overload._schema) != schema:
        raise Damaged(f"the operator {path} is another now")
    return overload


def _operator_at(path: str) -> torch._ops.OpOverload:
    """The operator with a namespace, a name and an overload.

    Raises:
        Damaged: there is none.
    """
    parts = path.split(".")
    if len(parts) != 3 or not all(part.isidentifier() for part in parts):
        raise Damaged(f"an operator {path[:80]}")
    try:
        overload = getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
    except AttributeError:
        raise Damaged(f"there is no operator {path[:80]}") from None
    if not isinstance(overload, torch._ops.OpOverload):
        raise Damaged(f"{path[:80]} is no operator")
    return overload


_known_operator = functools.lru_cache(maxsize=4096)(_operator_at)


def _searched(function: Any) -> str:
    """The name of a function that does not say where it is.

    Raises:
        NotStorable: it is in none of torch's modules.
    """
    own = getattr(function, "__name__", "")
    for space in _SPACES:
        name = f"{space}.{own}" if ":" in space else f"{space}:{own}"
        if own and _object_named(name) == function:
            return name
    for space in _SPACES[:2]:  # a method of tensors may have another name there than its own
        owner = _object_named(space) if ":" in space else sys.modules[space]
        for member in dir(owner):
            if inspect.getattr_static(owner, member, None) is function:
                return f"{space}.{member}" if ":" in space else f"{space}:{member}"
    raise NotStorable(f"{function!r} is in no module of torch")


def _object_named(name: str) -> Any:
    """The object that torch has by a name, without calling anything; None if there is none."""
    module, _, path = name.removesuffix(_GET).partition(":")
    value: Any = sys.modules.get(module) if module.partition(".")[0] == "torch" else None
    for part in path.split("."):
        if value is None or not part.isidentifier():
            return None
        value = inspect.getattr_static(value, part, None)
    if name.endswith(_GET):
        return getattr(value, "__get__", None) if inspect.isgetsetdescriptor(value) else None
    return value
