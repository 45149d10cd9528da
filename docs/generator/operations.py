"""The ops of the IR and the phases that admit them, read off the op classes."""

from __future__ import annotations

import inspect
from dataclasses import fields

from cg.ir.ops import OP_CLASSES, Collective, Op, attribute_names
from cg.ir.phases import Phase

from .tables import describe, table

_COMMON = tuple(f.name for f in fields(Op) if f.name not in ("operands", "results", "loc"))


def reference() -> str:
    """Every op: what it does, its attributes, operands and results."""
    parts = []
    for name, cls in OP_CLASSES.items():
        if issubclass(cls, Collective) and "### Collectives\n" not in parts:
            parts += ["### Collectives\n", inspect.cleandoc(Collective.__doc__ or "") + "\n"]
        parts.append(_op(name, cls))
    return "\n".join(parts)


def _op(name: str, cls: type[Op]) -> str:
    own = "; ".join(_attribute(cls, a) for a in attribute_names(cls) if a not in _COMMON)
    phases = ", ".join(str(phase) for phase in Phase if phase in cls.phases)
    lines = [
        f"### `{name}`\n",
        inspect.cleandoc(cls.__doc__ or ""),
        f"\n- takes: {cls.takes}",
        f"- gives: {cls.gives}",
        f"- attributes: {own or 'none of its own'}",
        f"- phases: {phases}",
    ]
    if cls.remedy:
        lines.append(f"- {cls.remedy}")
    return "\n".join(lines) + "\n"


def _attribute(cls: type[Op], name: str) -> str:
    field = next(f for f in fields(cls) if f.name == name)
    optional = field.default is None
    return f"`{name}`, {describe(str(field.type))}{' (may be left out)' if optional else ''}"


def phases() -> str:
    """The ops that each phase admits."""
    rows = [
        (f"`{name}`", *("✓" if phase in cls.phases else "" for phase in Phase))
        for name, cls in OP_CLASSES.items()
    ]
    return table(("op", *map(str, Phase)), rows)
