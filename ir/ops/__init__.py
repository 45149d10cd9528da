"""The ops: one class for each, with attributes as fields, and rules declared beside them.

An op has operands and results, which are values, and attributes, which are typed fields of its
class. The class also declares which phases admit the op, the types and places of operands and
results, how gradients flow through it and, if it is a collective, who exchanges what. The printer,
the parser, the verifier, the passes and the backends read these declarations. So a new op takes a
new class, listed in `OP_CLASSES`, and for devices a call of the library (CONTRIBUTING,
"Add an op").

Ops are plain data. Passes make new ops and new op lists, and there are no hidden lists of uses.
Values and ops compare by identity.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeAlias

from .base import Adjoint, Op, Value
from .collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Collective,
    Exchange,
    Gather,
    ReduceScatter,
    RoutedRows,
    Scatter,
)
from .host_copies import CopyStart
from .rank_local import Alloc, Backward, Call, Constant, Copy, Free, Return, View, Wait
from .regions import Assemble, Reserve, Slice
from .row_collectives import AllGatherRows, ReduceScatterRows, RowCollective
from .transfers import PointToPoint, Recv, Send, Transfer, batch_of

Communication: TypeAlias = PointToPoint | Collective
"""The ops by which ranks exchange values; they are asynchronous in a scheduled program."""

Asynchronous: TypeAlias = PointToPoint | Collective | CopyStart
"""The ops that give futures in a scheduled program."""

__all__ = [
    "Adjoint",
    "AllGather",
    "AllGatherRows",
    "AllReduce",
    "AllToAll",
    "Alloc",
    "Assemble",
    "Asynchronous",
    "Backward",
    "Barrier",
    "Broadcast",
    "Call",
    "Collective",
    "Communication",
    "Constant",
    "Copy",
    "CopyStart",
    "Exchange",
    "Free",
    "Gather",
    "OP_CLASSES",
    "Op",
    "PointToPoint",
    "Recv",
    "ReduceScatter",
    "ReduceScatterRows",
    "Reserve",
    "Return",
    "RoutedRows",
    "RowCollective",
    "Scatter",
    "Send",
    "Slice",
    "Transfer",
    "Value",
    "View",
    "Wait",
    "attribute_names",
    "attributes",
    "batch_of",
]

OP_CLASSES: dict[str, type[Op]] = {
    cls.opcode: cls
    for cls in (
        Constant,
        Call,
        View,
        Copy,
        CopyStart,
        Transfer,
        Slice,
        Reserve,
        Assemble,
        Send,
        Recv,
        AllReduce,
        AllGather,
        ReduceScatter,
        AllToAll,
        Broadcast,
        Gather,
        Scatter,
        Barrier,
        AllGatherRows,
        ReduceScatterRows,
        Wait,
        Alloc,
        Free,
        Backward,
        Return,
    )
}


_STRUCTURE = frozenset({"operands", "results", "loc"})


def attribute_names(cls: type[Op]) -> tuple[str, ...]:
    """The names of an op class's attributes, sorted, as in the text form."""
    return _ATTRIBUTE_NAMES[cls]


_ATTRIBUTE_NAMES: dict[type[Op], tuple[str, ...]] = {
    cls: tuple(sorted(f.name for f in fields(cls) if f.name not in _STRUCTURE))
    for cls in OP_CLASSES.values()
}


def attributes(op: Op) -> dict[str, Any]:
    """The attributes of an op that are set, sorted by name."""
    pairs = ((name, getattr(op, name)) for name in _ATTRIBUTE_NAMES[type(op)])
    return {name: value for name, value in pairs if value is not None}
