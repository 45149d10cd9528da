"""Follow the rows of experts through ops, and find the transfers in which they alone travel.

Tokens that ranks gather for their experts are needed at a rank only if it has an expert of theirs,
and a rank's summand of a result is zero in all other rows. Cheap ops may stand between the products
and the transfers. Those here keep the rows of a value in order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from ....ir.attributes import ReduceOp
from ....ir.layout import Cut, Layout, Region
from ....ir.types import Place
from .cases import Answer, ExpertRows, Shape, dims_of
from .change import Change
from .cuts import is_plain
from .versions import Version

_ATEN = torch.ops.aten
_RESHAPING = frozenset(
    {
        *(_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default),
        *(_ATEN.unsqueeze.default, _ATEN.squeeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims),
        *(_ATEN.clone.default, _ATEN._to_copy.default, _ATEN.neg.default),
        *(_ATEN.mul.Scalar, _ATEN.div.Scalar),
    }
)
"""Ops that have all entries of their operand, in the same order."""

_SCALING = frozenset({_ATEN.mul.Tensor, _ATEN.div.Tensor})
_ALIGNED = _SCALING | {_ATEN.add.Tensor, _ATEN.expand.default}
"""Ops that keep the rows of operands that have as many dimensions as the result."""


def kept(node: fx.Node, index: int, rows: ExpertRows) -> ExpertRows | None:
    """The rows of an operand of an op that are enough for rows of its result.

    Args:
        node: the op.
        index: the number of the operand among its tensors.
        rows: rows of the result.

    Returns:
        The same rows of the operand; None if the op may not keep them, or may make something
        infinite of the zeros that others are.
    """
    if node.target is _ATEN.div.Tensor and index:
        return None
    operand = node.all_input_nodes[min(index, len(node.all_input_nodes) - 1)]
    return _mapped(node, _shape(node), _shape(operand), rows)


def _mapped(node: fx.Node, have: Shape, other: Shape, rows: ExpertRows) -> ExpertRows | None:
    """The rows of a value that are those of another, of which one is a result of the other.

    Entries of a row count as a row where the other value has them as one.
    """
    lead, target = rows.lead, node.target
    if target in _RESHAPING:
        count = math.prod(have[:lead])
        leads = (n for n in range(1, len(other) + 1) if math.prod(other[:n]) == count)
        return _valid(rows, other, next(leads, 0))
    if target is _ATEN.sum.dim_IntList:
        operand, dims = node.args[:2]
        assert isinstance(operand, fx.Node)
        summed = [d for d in dims if isinstance(d, int)] if isinstance(dims, (list, tuple)) else []
        lead = min(lead, *dims_of(summed, len(_shape(operand))))
    elif target not in _ALIGNED or len(have) != len(other):
        return None
    pairs = zip(have[:lead], other, strict=False)
    return _valid(rows, other, sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], pairs)))


def _valid(rows: ExpertRows, shape: Shape, lead: int) -> ExpertRows | None:
    rows = replace(rows, lead=lead)
    return rows if lead and rows.fits(shape) else None


def _shape(node: fx.Node) -> Shape:
    return tuple(node.meta["val"].shape)


def summed_rows(
    node: fx.Node,
    answer: Answer,
    reads: Sequence[Version],
    summed: Mapping[fx.Node, ExpertRows],
) -> ExpertRows | None:
    """The rows in which a rank's summand of an op's result is not zero, if that is known.

    Args:
        node: the op.
        answer: its layouts.
        reads: the versions that it takes.
        summed: what is known of other values.
    """
    if answer.summed is not None:
        return answer.summed
    results = [layout for layout in answer.results if layout is not None]
    is_tensor = isinstance(node.meta["val"], torch.Tensor)
    if not is_tensor or len(results) != 1 or not results[0].summands or not reads:
        return None
    rows: set[ExpertRows | None] = set()
    for read in reads:
        if read.layout.summands:
            own = summed.get(read.node)
            rows.add(own and _mapped(node, _shape(read.node), _shape(node), own))
        elif node.target not in _SCALING:
            return None
    common = rows.pop() if len(rows) == 1 else None
    is_along = common is not None and {*common.cut.axes} <= {*results[0].summands}
    return common if is_along else None


def moves_rows(
    before: Layout, after: Layout, change: Change, shape: Shape, rows: ExpertRows, ids: Layout
) -> bool:
    """True if a transfer gathers rows from the ranks of experts, or reduces sums to these.

    Args:
        before, after: the layouts of the value.
        change: the work of the transfer.
        shape: the shape of the value.
        rows: the rows that travel.
        ids: the layout in which ranks have the ids.
    """
    axes = rows.cut.axes
    is_sum = change is Change.REDUCE
    coarse, fine = (before, after) if is_sum else (after, before)
    if not coarse.cuts or not _are_plain((*coarse.cuts, *fine.cuts, *ids.cuts)):
        return False
    ended = set(before.summands) - set(after.summands)
    return (
        change in (Change.REDUCE, Change.GATHER)
        and ended == (set(axes) if is_sum else set())
        and before.reduce is ReduceOp.SUM
        and fine.cuts[0].axes == (*coarse.cuts[0].axes, *axes)
        and fine.cuts[1:] == coarse.cuts[1:]
        and not any(coarse.cuts[1 : rows.lead])
        and rows.fits(shape)
        and ids.cuts[0].axes in ((), coarse.cuts[0].axes)
        and not any(ids.cuts[1:])
        and not ids.summands
    )


def _are_plain(cuts: Iterable[Cut]) -> bool:
    return all(map(is_plain, cuts))


def experts_of(rows: ExpertRows, place: Place) -> tuple[Region, ...]:
    """The experts of each rank."""
    return tuple([(rows.cut.piece(rows.experts, place.position(r)),) for r in place.ranks])
