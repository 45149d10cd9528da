"""Structural equality of modules: the same text form, locations aside.

`module.py` imports this file for `Module.__eq__`, so this file must not import that one when it
runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import Op, Value, attribute_names

if TYPE_CHECKING:
    from .module import Module, Program


def equal(a: Module, b: Module) -> bool:
    """True if two modules have the same text form, locations aside."""
    return difference(a, b) is None


def difference(a: Module, b: Module) -> str | None:
    """The first thing in which two modules differ, in words; None if they are equal.

    Names count and locations do not. The order of declarations does not count, that of programs
    and ops does. A program that has a rank is named by it.
    """
    for field in ("name", "phase", "world"):
        if found := _unlike(f"module: {field}", getattr(a, field), getattr(b, field)):
            return found
    tables = {"mesh": "meshes", "function": "functions", "vjp": "vjps", "channel": "channels"}
    for kind, table in tables.items():
        if found := _tables(kind, getattr(a, table), getattr(b, table)):
            return found
    if found := _unlike("bodies", sorted(a.bodies), sorted(b.bodies)):
        return found
    for name, body in a.bodies.items():
        if found := program_difference(body, b.bodies[name]):
            return f"body {found}"
    if found := _unlike("number of programs", len(a.programs), len(b.programs)):
        return found
    for one, other in zip(a.programs, b.programs, strict=True):
        if found := program_difference(one, other):
            return found
    return None


def program_difference(a: Program, b: Program) -> str | None:
    """The first thing in which two programs differ, in words; None if they are equal."""
    if found := _unlike("program: rank", a.rank, b.rank):
        return found
    if a.rank is None and (found := _unlike("program: name", a.name, b.name)):
        return found
    where = f"program @{a.name if a.rank is None else a.rank}"
    if found := _values(f"{where}: parameter", tuple(a.params), tuple(b.params)):
        return found
    for index, (one, other) in enumerate(zip(a.ops, b.ops, strict=False)):
        if found := _ops(one, other):
            return f"{where}, op {index}: {found}"
    return _unlike(f"{where}: number of ops", len(a.ops), len(b.ops))


def _ops(a: Op, b: Op) -> str | None:
    if type(a) is not type(b):
        return _unlike("opcode", a.opcode, b.opcode)
    if found := _values("result", a.results, b.results):
        return found
    if found := _values("operand", a.operands, b.operands):
        return found
    for name in attribute_names(type(a)):
        one, other = getattr(a, name), getattr(b, name)
        if one is not other and (found := _unlike(f"{a.opcode}: {name}", one, other)):
            return found
    return None


def _values(what: str, a: tuple[Value, ...], b: tuple[Value, ...]) -> str | None:
    if len(a) != len(b):
        return _unlike(f"number of {what}s", len(a), len(b))
    for index, (one, other) in enumerate(zip(a, b, strict=True)):
        if one is other:
            continue
        if one.name != other.name or (one.type is not other.type and one.type != other.type):
            return _unlike(f"{what} {index}", one, other)
    return None


def _tables(kind: str, a: Mapping[Any, Any], b: Mapping[Any, Any]) -> str | None:
    for key in a.keys() | b.keys():
        if key not in a or key not in b:
            return f"{kind} {key}: only in the {'first' if key in a else 'second'}"
        if found := _unlike(f"{kind} {key}", a[key], b[key]):
            return found
    return None


def _unlike(what: str, a: Any, b: Any) -> str | None:
    """Say that two things differ, if they do: 1, 1.0 and true differ, and a NaN equals itself."""
    same = a == b if type(a) is not float else repr(a) == repr(b)
    if type(a) is type(b) and same:
        return None
    return f"{what}: {a!r} in the first, {b!r} in the second"
