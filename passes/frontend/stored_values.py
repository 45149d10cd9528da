"""Follow stored parameters and their gradients through a program."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

from ...ir.attributes import Effect
from ...ir.ops import Assemble, Call, Collective, CopyStart, Op, Slice, Transfer, Value, Wait
from ...ir.ops.module import Function, FunctionKind


class Way(enum.Enum):
    """The state of a stored parameter, or of its gradient, on its way.

    PIECE: a piece of the parameter at rest. GATHERED: the parameter as it is used. TERM: a gradient
    before its reduction. REDUCED: a piece of the reduced gradient.
    """

    PIECE = enum.auto()
    GATHERED = enum.auto()
    TERM = enum.auto()
    REDUCED = enum.auto()


_BEHIND = {Way.PIECE: Way.GATHERED, Way.TERM: Way.REDUCED}
"""The state behind a collective or transfer, by the state before it."""


def ways_of(ops: Sequence[Op], functions: Mapping[str, Function]) -> dict[Value, Way]:
    """The values of a program that are stored parameters or their gradients, with their states.

    Args:
        ops: the ops of a program in any phase, after `inline`.
        functions: the functions of its module, by name.
    """
    ways: dict[Value, Way] = {}
    if all(function.parameter is None for function in functions.values()):
        return ways
    for op in ops:
        way = next((ways[value] for value in op.operands if value in ways), None)
        if isinstance(op, Call):
            function = functions[op.fn.name]
            if function.parameter is not None and way is None:
                way = Way.PIECE if function.effect is Effect.READ else Way.TERM
            elif function.parameter is not None and way is Way.PIECE:
                way = Way.GATHERED  # it comes from the host, and needs no gather
            elif function.parameter is None and function.kind is not FunctionKind.BUILTIN:
                continue
        elif isinstance(op, Collective | Transfer):
            way = None if way is None else _BEHIND.get(way, way)
        elif not isinstance(op, Slice | Assemble | Wait | CopyStart):
            continue
        if way is not None:
            ways.update(dict.fromkeys(op.results, way))
    return ways
