"""Reference tables that are read off the code."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields

import cg
from cg.ir.attributes import Action, Effect, ReduceOp, Stream, Traffic
from cg.ir.ops.module import Channel, Function, FunctionKind, Vjp
from cg.ir.types import DType
from cg.launch.environment import config

from .docstrings import first_sentence, to_markdown


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    cells = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines)
    return "\n".join(f"| {line} |" for line in cells)


def environment() -> str:
    """Every environment variable."""
    return config.table()


def element_types() -> str:
    """The element types with their sizes."""
    sized = {d: f"`{d}` {d.itemsize}" for d in DType}
    real = ", ".join(text for d, text in sized.items() if d.is_differentiable)
    other = ", ".join(text for d, text in sized.items() if not d.is_differentiable)
    return (
        f"Element types, and the bytes of each. With gradients: {real}. Without: {other}.\n\n"
        "A scalar's shape is empty."
    )


def enumerations() -> str:
    """The attributes that take one of a few words."""
    return table(
        ("what", "values", "meaning"),
        [
            (
                _NAMES[kind],
                ", ".join(f"`{member.value}`" for member in kind),
                " ".join(inspect.cleandoc(kind.__doc__ or "").split()),
            )
            for kind in _NAMES
        ],
    )


_NAMES: dict[type[enum.Enum], str] = {
    Effect: "effect",
    FunctionKind: "kind",
    Stream: "stream",
    ReduceOp: "reduction",
    Traffic: "traffic",
    Action: "action of a task",
}


def declarations() -> str:
    """The attributes of `function`, `vjp` and `channel`."""
    parts = []
    for cls, word in ((Function, "function"), (Vjp, "vjp"), (Channel, "channel")):
        meanings = _attributes(cls)
        rows = []
        for f in sorted(fields(cls), key=lambda f: f.name):
            if f.name in _SYNTAX[cls]:
                continue
            kind = str(f.type).replace("str", "Symbol") if cls is Vjp else str(f.type)
            rows.append((f"`{f.name}`", describe(kind), _default(f.default), meanings[f.name]))
        parts.append(f"### `{word}`\n\n{to_markdown(cls.__doc__, skip=('Attributes',))}\n")
        parts.append(table(("attribute", "is", "default", "meaning"), rows) + "\n")
    return "\n".join(parts)


_SYNTAX: dict[type, set[str]] = {
    Function: {"name", "inputs", "outputs", "loc"},
    Vjp: {"name"},
    Channel: {"id"},
}
_KINDS = {
    "str": "a word or string",
    "int": "a number",
    "bool": "`true` or `false`",
    "float | int | bool": "a number, `true` or `false`",
    "tuple[int, ...]": "a set of numbers",
    "tuple[tuple[int, int], ...]": "a set of pairs",
    "Effect": "an effect",
    "Flops": "counts by element type",
    "FunctionKind": "a kind",
    "Shares": "effects by actor",
    "Symbol": "a symbol",
    "Place": "a set of ranks",
    "ReduceOp": "a reduction",
    "Region": "a region",
    "Traffic": "a traffic",
    "tuple[Region, ...]": "a set of regions",
}


def describe(annotation: str) -> str:
    """The kind of an attribute, in words, from the annotation of its field."""
    return _KINDS[annotation.removesuffix(" | None")]


def _default(value: object) -> str:
    if value is MISSING:
        return "must be given"
    if isinstance(value, enum.Enum):
        return f"`{value.value}`"
    return "none" if value in (None, ()) else f"`{str(value).lower()}`"


def _attributes(cls: type) -> dict[str, str]:
    """The section `Attributes:` of a docstring, by name."""
    body = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]
    found: dict[str, str] = {}
    names: list[str] = []
    for line in body.splitlines():
        if line.startswith("    ") and not line.startswith("     "):
            head, _, text = line.strip().partition(": ")
            names = [name.strip() for name in head.split(",")]
            found |= dict.fromkeys(names, text)
        else:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


def schedules() -> str:
    """The schedules that `by_name` finds, with their factories."""
    rows = []
    for name in cg.schedules.names():
        schedule = cg.schedules.by_name(name)
        factory = name.replace("-", "_").replace("1f1b", "one_f_one_b")
        doc = inspect.getdoc(getattr(cg.schedules, factory))
        assert schedule.name == name
        rows.append((f"`{name}`", f"`cg.schedules.{factory}()`", first_sentence(doc)))
    return table(("name", "made by", "what it is"), rows)
