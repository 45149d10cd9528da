"""Follow parameters that are stored in pieces, and their gradients, through a program."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

from ...ir.attributes import Effect
from ...ir.ops import Assemble, Call, Collective, Op, Slice, Transfer, Value, Wait
from ...ir.ops.module import Function, FunctionKind


class Way(enum.Enum):
    """How far a parameter that is stored in pieces, or its gradient, has come.

    PIECE: as it rests. GATHERED: as it is used. TERM: a gradient, to be reduced. REDUCED: a
    gradient's piece.
    """

    PIECE = enum.auto()
    GATHERED = enum.auto()
    TERM = enum.auto()
    REDUCED = enum.auto()


_BEHIND = {Way.PIECE: Way.GATHERED, Way.TERM: Way.REDUCED}
"""What collectives and transfers make of them."""


def ways_of(ops: Sequence[Op], functions: Mapping[str, Function]) -> dict[Value, Way]:
    """The values that are such parameters, or such gradients, on their way.

    Args:
        ops: of a program in any phase, in which functions that are programs have been inlined.
        functions: of its module.
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
            elif function.parameter is None and function.kind is not FunctionKind.BUILTIN:
                continue
        elif isinstance(op, Collective | Transfer):
            way = None if way is None else _BEHIND.get(way, way)
        elif not isinstance(op, Slice | Assemble | Wait):
            continue
        if way is not None:
            ways.update(dict.fromkeys(op.results, way))
    return ways
