"""The local forms of ops that select entries along a dimension of which a rank has a part.

A rank reads its own entries, and takes zeros for those of others: the sum over ranks is the result.
It writes to its own entries; what goes to others is written behind its last entry, and cut off. In
both cases each rank checks the indices, since an index that is beyond all entries is nobody's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .....ir.layout import Region, shape_of
from ..cases import LocalOp
from ..values.ids import CHECKED_IDS

_ATEN = torch.ops.aten

Run = Callable[[Mapping[int, fx.Node], Any], fx.Node]
"""Adds an op with other indices, by their number, and another source."""


@dataclass(frozen=True)
class Selection:
    """A tensor of indices that selects entries along a dimension of an op's first operand.

    Attributes:
        dim: the dimension.
        number: the number of the index tensor, as `Run` takes it.
        operand: its number among the op's operands.
        wraps: whether negative indices count from the end.
    """

    dim: int
    number: int
    operand: int
    wraps: bool = False


def first_entry(region: Region) -> list[int]:
    """The indices of a piece's first entry; empty if its entries lie apart."""
    if any(len(intervals) > 1 for intervals in region):
        return []
    return [intervals[0][0] if intervals else 0 for intervals in region]


def own_rows(intervals: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The first row of a piece, and their number."""
    return (intervals[0][0], intervals[0][1] - intervals[0][0]) if intervals else (0, 0)


def within(op: LocalOp, indices: Any, first: int, count: int) -> tuple[Any, Any]:
    """Indices into a rank's rows, with 0 for rows of other ranks; and a mask of its own rows."""
    own = op.emit(_ATEN.sub.Tensor, indices, first)
    above = op.emit(_ATEN.ge.Scalar, own, 0)
    below = op.emit(_ATEN.lt.Scalar, own, count)
    inside = op.emit(_ATEN.logical_and.default, above, below)
    return op.emit(_ATEN.where.ScalarOther, inside, own, 0), inside


def partial_selections(
    op: LocalOp, selections: Sequence[Selection], source: Any
) -> list[Selection]:
    """The selections along dimensions of which the rank does not have all of a source's entries."""
    here, shape = shape_of(op.operands[0]), tuple(source)
    return [each for each in selections if here[each.dim] != shape[each.dim]]


def taken(
    op: LocalOp,
    selections: Sequence[Selection],
    indices: Mapping[int, fx.Node],
    size: Sequence[int],
    trailing: int,
    run: Run,
) -> fx.Node:
    """Read the rank's own entries; zeros stand for those of other ranks.

    Args:
        op: the op.
        selections: those along dimensions of which the rank has a part.
        indices: the index tensors, by number.
        size: the shape of the whole source.
        trailing: the number of dimensions of the result behind those of the indices.
        run: adds the op.
    """
    region = op.results[0]
    assert region is not None
    source = op.arguments["self"]
    if not all(op.operands[0][each.dim] for each in selections):
        return op.emit(_ATEN.new_zeros.default, source, list(shape_of(region)))
    chosen, mask = dict(indices), None
    for each in selections:
        first, count = own_rows(op.operands[0][each.dim])
        checked = _checked(op, each, indices[each.number], size[each.dim])
        chosen[each.number], inside = within(op, checked, first, count)
        mask = inside if mask is None else op.emit(_ATEN.logical_and.default, mask, inside)
    for _ in range(trailing):
        mask = op.emit(_ATEN.unsqueeze.default, mask, -1)
    return op.emit(_ATEN.where.ScalarOther, mask, run(chosen, source), 0)


def written(
    op: LocalOp,
    selections: Sequence[Selection],
    indices: Mapping[int, fx.Node],
    size: Sequence[int],
    run: Run,
) -> fx.Node:
    """Write to the rank's own entries; the arguments are those of `taken`."""
    source = longer = op.arguments["self"]
    chosen = dict(indices)
    for each in selections:
        first, count = own_rows(op.operands[0][each.dim])
        shape = list(longer.meta["val"].shape)
        shape[each.dim] = 1
        entry = op.emit(_ATEN.new_zeros.default, longer, shape)
        longer = op.emit(_ATEN.cat.default, [longer, entry], each.dim)
        checked = _checked(op, each, indices[each.number], size[each.dim])
        own, inside = within(op, checked, first, count)
        chosen[each.number] = op.emit(_ATEN.where.ScalarOther, inside, own, count)
    here = tuple(((0, n),) if n else () for n in shape_of(op.operands[0]))
    result = op.piece(run(chosen, longer), here)
    if op.target._schema.is_mutable:
        return op.emit(_ATEN.copy_.default, source, result)
    return result


def _checked(op: LocalOp, selection: Selection, indices: fx.Node, size: int) -> fx.Node:
    """Indices from 0, after a check that they are within the whole dimension."""
    if selection.wraps:
        below = op.emit(_ATEN.lt.Scalar, indices, 0)
        valid = op.emit(_ATEN.ge.Scalar, indices, -size)
        wrapped = op.emit(_ATEN.add.Scalar, indices, size)
        negative = op.emit(_ATEN.logical_and.default, below, valid)
        indices = op.emit(_ATEN.where.self, negative, wrapped, indices)
    name = op.target._schema.name.removeprefix("aten::")
    place = first_entry(op.operands[selection.operand])
    return op.emit(CHECKED_IDS, indices, size, None, name, place)
