"""Rules of embeddings, whose table may be cut, and of the check of their ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .....ir.layout import shape_of, whole
from ..cases import Answer, Case, LocalOp, Rule
from ..cuts import is_interval
from ..factors import Factors, each, solve
from ..values.ids import CHECKED_IDS
from .pointwise import pointwise
from .rows import first_entry, own_rows, within
from .views import named

_ATEN = torch.ops.aten


def _checked_ids(case: Case) -> Answer:
    return replace(pointwise(case), local=_local_checked)


def _local_checked(op: LocalOp) -> Any:
    return op.run(first=first_entry(op.operands[0]))


def _embedding(case: Case) -> Answer:
    """If the vocabulary is cut, a rank looks up its own rows, and takes zeros for the others.

    So an id beyond the vocabulary would get zeros on all ranks. Each rank checks ids itself.
    """
    inner = named(case["indices"].shape, "i")
    sizes = {"v": case["weight"].shape[0], "d": case["weight"].shape[1]}
    sizes |= {f"i{n}": size for n, size in enumerate(case["indices"].shape)}
    operands = ((("v",), ("d",)), inner)
    keep = {"v": "is packed"} if not is_interval(case["weight"].cuts[0]) else {}
    factors = Factors(operands, ((*inner, ("d",)),), sizes, each(0), keep)
    return solve(case, factors, local=partial(_local_embedding, sizes["v"]))


def _local_embedding(vocabulary: int, op: LocalOp) -> Any:
    first, count = own_rows(op.operands[0][0])
    if count == vocabulary:
        return op.run()
    region = op.results[0]
    assert region is not None
    weight, indices = op.arguments["weight"], op.arguments["indices"]
    if not count:
        return op.emit(_ATEN.new_zeros.default, weight, list(shape_of(region)))
    place = first_entry(op.operands[1])
    indices = op.emit(CHECKED_IDS, indices, vocabulary, None, "embedding", place)
    safe, inside = within(op, indices, first, count)
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
    return solve(case, factors, local=_local_embedding_backward, free={0: "v"})


def _local_embedding_backward(op: LocalOp) -> Any:
    region, shape = op.results[0], op.shapes[0]
    assert region is not None
    assert shape is not None
    first, count = own_rows(region[0])
    if count == shape[0]:
        return op.run()
    grad, indices = op.arguments["grad_output"], op.arguments["indices"]
    if not count:
        return op.emit(_ATEN.new_zeros.default, grad, list(shape_of(region)))
    safe, inside = within(op, indices, first, count)
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


RULES: Mapping[object, Rule] = {
    CHECKED_IDS: _checked_ids,
    _ATEN.embedding.default: _embedding,
    _ATEN.embedding_dense_backward.default: _embedding_backward,
}
