"""Structural equality of modules: the same text form, without locations.

`module.py` imports this file for `Module.__eq__`, so this file imports `module.py` for types only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import Op, Value, attribute_names

if TYPE_CHECKING:
    from .module import Module, Program


def equal(a: Module, b: Module) -> bool:
    """True if two modules have the same text form, without locations."""
    return difference(a, b) is None


def difference(a: Module, b: Module) -> str | None:
    """The first difference between two modules, in words; None if they are equal.

    Names count, and locations do not. The order of programs and ops counts, and that of
    declarations does not. A program with a rank is named by its rank.
    """
    for field in ("name", "phase", "world"):
        if mismatch := _unlike(f"module: {field}", getattr(a, field), getattr(b, field)):
            return mismatch
    tables = {"mesh": "meshes", "function": "functions", "vjp": "vjps", "channel": "channels"}
    for kind, table in tables.items():
        if mismatch := _tables(kind, getattr(a, table), getattr(b, table)):
            return mismatch
    if mismatch := _unlike("bodies", sorted(a.bodies), sorted(b.bodies)):
        return mismatch
    for name, body in a.bodies.items():
        if mismatch := program_difference(body, b.bodies[name]):
            return f"body {mismatch}"
    if mismatch := _unlike("number of programs", len(a.programs), len(b.programs)):
        return mismatch
    for one, other in zip(a.programs, b.programs, strict=True):
        if mismatch := program_difference(one, other):
            return mismatch
    return None


def program_difference(a: Program, b: Program) -> str | None:
    """The first difference between two programs, in words; None if they are equal."""
    if mismatch := _unlike("program: rank", a.rank, b.rank):
        return mismatch
    if a.rank is None and (mismatch := _unlike("program: name", a.name, b.name)):
        return mismatch
    where = f"program @{a.name if a.rank is None else a.rank}"
    if mismatch := _values(f"{where}: parameter", tuple(a.params), tuple(b.params)):
        return mismatch
    for index, (one, other) in enumerate(zip(a.ops, b.ops, strict=False)):
        if mismatch := _ops(one, other):
            return f"{where}, op {index}: {mismatch}"
    return _unlike(f"{where}: number of ops", len(a.ops), len(b.ops))


def _ops(a: Op, b: Op) -> str | None:
    if type(a) is not type(b):
        return _unlike("opcode", a.opcode, b.opcode)
    if mismatch := _values("result", a.results, b.results):
        return mismatch
    if mismatch := _values("operand", a.operands, b.operands):
        return mismatch
    for name in attribute_names(type(a)):
        one, other = getattr(a, name), getattr(b, name)
        if one is not other and (mismatch := _unlike(f"{a.opcode}: {name}", one, other)):
            return mismatch
    return None


def _values(noun: str, a: tuple[Value, ...], b: tuple[Value, ...]) -> str | None:
    if len(a) != len(b):
        return _unlike(f"number of {noun}s", len(a), len(b))
    for index, (one, other) in enumerate(zip(a, b, strict=True)):
        if one is other:
            continue
        if one.name != other.name or (one.type is not other.type and one.type != other.type):
            return _unlike(f"{noun} {index}", one, other)
    return None


def _tables(kind: str, a: Mapping[Any, Any], b: Mapping[Any, Any]) -> str | None:
    for key in a.keys() | b.keys():
        if key not in a or key not in b:
            return f"{kind} {key}: only in the {'first' if key in a else 'second'}"
        if mismatch := _unlike(f"{kind} {key}", a[key], b[key]):
            return mismatch
    return None


def _unlike(subject: str, a: Any, b: Any) -> str | None:
    """Say how two values differ, if they do; 1, 1.0 and true differ, and a NaN equals itself."""
    same = a == b if type(a) is not float else repr(a) == repr(b)
    if type(a) is type(b) and same:
        return None
    return f"{subject}: {a!r} in the first, {b!r} in the second"
