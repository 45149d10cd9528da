"""The ops of the IR and the phases that admit them, read off the op classes."""

from __future__ import annotations

import inspect
from dataclasses import fields

from cg.ir.module import Phase
from cg.ir.ops import OP_CLASSES, Collective, Op, attribute_names
from cg.ir.phases import LEGAL, REMEDIES

from .tables import describe, table

_EACH = "one tensor for each rank, all of one type"

OPERANDS = {
    "constant": ("none", "one; a tensor if `fill` is given"),
    "call": ("the function's inputs", "the function's outputs"),
    "view": ("a tensor", "the tensor with `length` entries in `dim`"),
    "copy": ("a value", "a value of the same type"),
    "transfer": ("a value", "the same type at another place"),
    "send": ("a value", "`future<unit>`"),
    "recv": ("none, or a buffer of the type that is promised", "`future<T>`"),
    "all_reduce": (_EACH, "that type, at the group"),
    "all_gather": (
        _EACH,
        "`dim` times the ranks, at the group",
    ),
    "reduce_scatter": (
        _EACH,
        "for each rank its part of `dim`",
    ),
    "all_to_all": (_EACH, "for each rank the same type"),
    "broadcast": ("the root's value", "the same type, at the group"),
    "barrier": ("none", "`unit`, at the group"),
    "wait": ("a future, or a value of another stream", "the value; none is needed for a unit"),
    "alloc": ("none", "a tensor"),
    "free": ("the storage, then whatever has to have happened", "none"),
    "backward": ("one or more real floating scalars", "none"),
    "return": ("the outputs", "none"),
}
"""Operands and results, in words: what `ir/verify/op_rules.py` checks."""

_COMMON = tuple(f.name for f in fields(Op) if f.name not in ("operands", "results", "loc"))


def reference() -> str:
    """Every op: what it does, its attributes, operands and results."""
    if OPERANDS.keys() != OP_CLASSES.keys():
        raise KeyError(f"describe the operands of {OPERANDS.keys() ^ OP_CLASSES.keys()}")
    parts = []
    for name, cls in OP_CLASSES.items():
        if issubclass(cls, Collective) and "### Collectives\n" not in parts:
            parts += ["### Collectives\n", inspect.cleandoc(Collective.__doc__ or "") + "\n"]
        parts.append(_op(name, cls))
    return "\n".join(parts)


def _op(name: str, cls: type[Op]) -> str:
    operands, results = OPERANDS[name]
    own = "; ".join(_attribute(cls, a) for a in attribute_names(cls) if a not in _COMMON)
    phases = ", ".join(str(phase) for phase in Phase if cls in LEGAL[phase])
    lines = [
        f"### `{name}`\n",
        inspect.cleandoc(cls.__doc__ or ""),
        f"\n- takes: {operands}",
        f"- gives: {results}",
        f"- attributes: {own or 'none of its own'}",
        f"- phases: {phases}",
    ]
    if cls in REMEDIES:
        lines.append(f"- {REMEDIES[cls]}")
    return "\n".join(lines) + "\n"


def _attribute(cls: type[Op], name: str) -> str:
    field = next(f for f in fields(cls) if f.name == name)
    optional = field.default is None
    return f"`{name}`, {describe(str(field.type))}{' (may be left out)' if optional else ''}"


def phases() -> str:
    """Which ops each phase admits."""
    rows = [
        (f"`{name}`", *("✓" if cls in LEGAL[phase] else "" for phase in Phase))
        for name, cls in OP_CLASSES.items()
    ]
    return table(("op", *map(str, Phase)), rows)
