"""The attributes that ops and declarations may have, by the annotations of their classes."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields

from ..ops import OP_CLASSES, Op, attribute_names
from ..ops.module import Channel, Function, Vjp
from . import literals
from .literals import Reader


@dataclass(frozen=True)
class KnownAttributes:
    """The attributes that one kind of op or declaration may have between its braces."""

    readers: dict[str, Reader]
    required: frozenset[str]


def _op_attributes(cls: type[Op]) -> KnownAttributes:
    readers = literals.readers_of(cls)
    names = attribute_names(cls)
    defaults = {f.name: f.default for f in fields(cls)}
    required = frozenset(name for name in names if defaults[name] is not None)
    return KnownAttributes({name: readers[name] for name in names}, required)


def _declaration_attributes(cls: type, skip: set[str], **special: Reader) -> KnownAttributes:
    readers = literals.readers_of(cls) | special
    names = {f.name: f.default is MISSING for f in fields(cls) if f.name not in skip}
    required = frozenset(name for name, needed in names.items() if needed)
    return KnownAttributes({name: readers[name] for name in names}, required)


def symbol_name(text: str) -> str:
    """The name in the text of a symbol, `@name`."""
    return literals.parse_symbol(text).name


OPS = {opcode: (cls, _op_attributes(cls)) for opcode, cls in OP_CLASSES.items()}
FUNCTION = _declaration_attributes(Function, {"name", "inputs", "outputs", "loc"})
CHANNEL = _declaration_attributes(Channel, {"id"})
VJP = _declaration_attributes(
    Vjp, {"name"}, **dict.fromkeys(("forward", "backward", "input", "weight"), symbol_name)
)
