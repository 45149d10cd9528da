"""The local forms of ops that select entries along a dimension of which a rank has a part.

A rank reads its own entries, and takes zeros for those of others: the sum over ranks is the result.
It writes to its own entries; what goes to others is written behind its last entry, and cut off. In
both cases each rank checks the indices, since an index that is beyond all entries is nobody's.
Embeddings, whose rules are here, do that for a cut vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from .....ir.layout import Intervals, Region, length, shape_of, whole
from ....checked_ids import CHECKED_IDS
from ....values.operators import written_values
from ...autodiff.subgraphs import is_view
from ..cases import Answer, Case, Expansion, LocalOp, Rule, dim_of
from ..cuts import is_packed
from ..factors import Factors, each
from ..solution import solve
from ..tokens import reduced_to_tokens
from .creation import zeros
from .pointwise import pointwise
from .views import moved, named

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


def within(op: LocalOp, indices: Any, intervals: Intervals) -> tuple[Any, Any]:
    """Indices into a rank's rows, with 0 for rows of other ranks; and a mask of its own rows."""
    own = inside = None
    before = 0
    for start, stop in intervals or ((0, 0),):
        place = op.emit(_ATEN.sub.Tensor, indices, start - before)
        above = op.emit(_ATEN.ge.Scalar, place, before)
        before += stop - start
        below = op.emit(_ATEN.lt.Scalar, place, before)
        here = op.emit(_ATEN.logical_and.default, above, below)
        if own is None:
            own, inside = op.emit(_ATEN.where.ScalarOther, here, place, 0), here
        else:
            own = op.emit(_ATEN.where.self, here, place, own)
            inside = op.emit(_ATEN.logical_or.default, inside, here)
    return own, inside


def partial_selections(
    op: LocalOp, selections: Sequence[Selection], source: Any
) -> list[Selection]:
    """The selections along dimensions of which the rank does not have all of a source's entries."""
    here, shape = shape_of(op.operands[0]), tuple(source)
    return [selection for selection in selections if here[selection.dim] != shape[selection.dim]]


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
    if not all(op.operands[0][s.dim] for s in selections):
        return op.emit(_ATEN.new_zeros.default, source, list(shape_of(region)))
    chosen, mask = dict(indices), None
    for selection in selections:
        checked = _checked(op, selection, indices[selection.number], size[selection.dim])
        rows = op.operands[0][selection.dim]
        chosen[selection.number], inside = within(op, checked, rows)
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
    for selection in selections:
        rows = op.operands[0][selection.dim]
        shape = list(longer.meta["val"].shape)
        shape[selection.dim] = 1
        entry = op.emit(_ATEN.new_zeros.default, longer, shape)
        longer = op.emit(_ATEN.cat.default, [longer, entry], selection.dim)
        checked = _checked(op, selection, indices[selection.number], size[selection.dim])
        own, inside = within(op, checked, rows)
        chosen[selection.number] = op.emit(_ATEN.where.ScalarOther, inside, own, length(rows))
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


def _checked_ids(case: Case) -> Answer:
    return replace(pointwise(case), local=_local_checked)


def _local_checked(op: LocalOp) -> Any:
    return op.run(first=first_entry(op.operands[0]))


def _embedding(case: Case) -> Answer | Expansion:
    """If the vocabulary is cut, a rank looks up its own rows, and takes zeros for the others.

    So an id beyond the vocabulary would get zeros on all ranks. Each rank checks ids itself.
    """
    inner = named(case["indices"].shape, "i")
    sizes = {"v": case["weight"].shape[0], "d": case["weight"].shape[1]}
    sizes |= {f"i{n}": size for n, size in enumerate(case["indices"].shape)}
    operands = ((("v",), ("d",)), inner)
    keep = {"v": "is packed"} if is_packed(case["weight"].cuts[0]) else {}
    factors = Factors(operands, ((*inner, ("d",)),), sizes, each(0), keep)
    answer = solve(case, factors, local=partial(_local_embedding, sizes["v"]))
    return reduced_to_tokens(case, answer, case["indices"].shape) or answer


def _local_embedding(vocabulary: int, op: LocalOp) -> Any:
    own_rows = op.operands[0][0]
    if length(own_rows) == vocabulary:
        return op.run()
    region = op.results[0]
    assert region is not None
    weight, indices = op.arguments["weight"], op.arguments["indices"]
    if not own_rows:
        return op.emit(_ATEN.new_zeros.default, weight, list(shape_of(region)))
    place = first_entry(op.operands[1])
    indices = op.emit(CHECKED_IDS, indices, vocabulary, None, "embedding", place)
    safe, inside = within(op, indices, own_rows)
    rows = op.emit(_ATEN.embedding.default, weight, safe)
    mask = op.emit(_ATEN.unsqueeze.default, inside, -1)
    return op.emit(_ATEN.where.ScalarOther, mask, rows, 0)


def _embedding_backward(case: Case) -> Answer:
    """The gradient of the table: each rank computes the rows that are asked of it."""
    inner = named(case["indices"].shape, "i")
    sizes = {"v": case.shape()[0], "d": case.shape()[1]}
    sizes |= {f"i{n}": size for n, size in enumerate(case["indices"].shape)}
    keep = {}
    if case["scale_grad_by_freq"]:
        keep = {f"i{n}": "is counted" for n in range(len(inner))}
    operands = ((*inner, ("d",)), inner)
    # Not declared linear: summands have fewer rows before the op, of tokens, than behind it.
    factors = Factors(operands, ((("v",), ("d",)),), sizes, (), keep)
    is_cut = case.end is not None and not case.sequence.isdisjoint(case.end[0].axes)
    tokens = f"i{len(inner) - 1}" if is_cut and inner else None
    return solve(case, factors, local=_local_embedding_backward, free={0: "v"}, tokens=tokens)


def _local_embedding_backward(op: LocalOp) -> Any:
    region, shape = op.results[0], op.shapes[0]
    assert region is not None
    assert shape is not None
    count = length(region[0])
    if count == shape[0]:
        return op.run()
    grad, indices = op.arguments["grad_output"], op.arguments["indices"]
    if not count:
        return op.emit(_ATEN.new_zeros.default, grad, list(shape_of(region)))
    safe, inside = within(op, indices, region[0])
    if op.arguments["padding_idx"] >= 0:
        counted = op.emit(_ATEN.ne.Scalar, indices, op.arguments["padding_idx"])
        inside = op.emit(_ATEN.logical_and.default, inside, counted)
    mask = op.emit(_ATEN.unsqueeze.default, inside, -1)
    if op.arguments["scale_grad_by_freq"]:  # ids of others are counted in a row of their own
        others = op.emit(_ATEN.where.ScalarOther, inside, safe, count)
        extended = op.run(indices=others, num_weights=count + 1, padding_idx=count)
        return op.piece(extended, (((0, count),), *whole(shape[1:])))
    own = op.emit(_ATEN.where.ScalarOther, mask, grad, 0)
    return op.run(grad_output=own, indices=safe, num_weights=count, padding_idx=-1)


def _select(case: Case) -> Answer:
    """The rank that has the index gives its entry, and all others zeros, of which it is the sum.

    Such a sum is no view, so nobody may write to it.
    """
    (operand,) = case.operands
    dims = named(operand.shape)
    dim = dim_of(case["dim"], len(dims))
    selected = [user for user in operand.node.users if user.target is case.target]
    is_sum = operand.dtype is not torch.bool and not any(map(_is_written, selected))
    keep = {} if is_sum else {dims[dim][0]: "has one index selected"}
    index = case["index"] % operand.shape[dim]
    local = partial(_own_index, dim, index) if operand.cuts[dim] else None
    return moved(case, dims, (*dims[:dim], *dims[dim + 1 :]), keep, local=local)


def _is_written(view: fx.Node) -> bool:
    """True if an op writes to a view in place, or to a view of it."""
    return any(
        view in written_values(user.target, user.args, user.kwargs)
        or (is_view(user) and _is_written(user))
        for user in view.users
    )


def _own_index(dim: int, index: int, op: LocalOp) -> Any:
    before = 0
    for first, last in op.operands[0][dim]:
        if first <= index < last:
            return op.run(index=before + index - first)
        before += last - first
    return zeros(op, op.arguments["self"])


RULES: Mapping[object, Rule] = {
    CHECKED_IDS: _checked_ids,
    _ATEN.select.int: _select,
    _ATEN.embedding.default: _embedding,
    _ATEN.embedding_dense_backward.default: _embedding_backward,
}
