"""Rules of ops that join tensors along a dimension, or take a tensor apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from .....ir.layout import shape_of
from ..cases import Answer, Case, LocalOp, Rule, dim_of
from ..factors import Dims, Factors, each, jointly
from ..solution import solve
from .views import named

_ATEN = torch.ops.aten


def _cat(case: Case) -> Answer:
    """Tensors of equal lengths may be cut along the dimension: the result is cut in blocks.

    An empty vector among tensors of more dimensions, from which caches grow, joins nothing.
    """
    rank = len(case.shape())
    joins = [len(operand.shape) == rank for operand in case.operands]
    dim = dim_of(case["dim"], rank)
    dims = named(case.shape())
    lengths = [o.shape[dim] for o, is_joined in zip(case.operands, joins, strict=True) if is_joined]
    sizes = {f"d{i}": size for i, size in enumerate(case.shape())}
    several = len(set(lengths)) > 1
    keep = {f"c{i}": "is joined with others of another length" for i in range(len(joins))}
    operand_dims: list[Dims] = []
    for i, is_joined in enumerate(joins):
        own = f"c{i}" if several or not is_joined else "b"
        sizes[own] = case.operands[i].shape[dim if is_joined else 0]
        operand_dims.append((*dims[:dim], (own,), *dims[dim + 1 :]) if is_joined else ((own,),))
    sizes["n"] = len(lengths)
    joined = (dims[dim] if several else ("n", "b"),)
    result = (*dims[:dim], *joined, *dims[dim + 1 :])
    linear = jointly(*range(len(joins)))
    keep = {name: why for name, why in keep.items() if name in sizes}
    factors = Factors(tuple(operand_dims), (result,), sizes, linear, keep, moves=True)
    return solve(case, factors)


def _stack(case: Case) -> Answer:
    result = named(case.shape())
    dim = dim_of(case["dim"], len(result))
    operand_dims = (*result[:dim], *result[dim + 1 :])
    count = len(case.operands)
    sizes = {f"d{i}": size for i, size in enumerate(case.shape())}
    linear = jointly(*range(count))
    return solve(case, Factors((operand_dims,) * count, (result,), sizes, linear, moves=True))


def _split(case: Case) -> Answer:
    return _parts(case, [case.shape(i)[_dim(case)] for i in range(len(case.shapes))])


def _dim(case: Case) -> int:
    return dim_of(case["dim"], len(case.operands[0].shape))


def _parts(case: Case, lengths: Sequence[int]) -> Answer:
    """Parts of equal length may be cut, if each has one or more blocks of the dimension's cut."""
    dim, dims = _dim(case), named(case.operands[0].shape)
    sizes = {f"d{i}": size for i, size in enumerate(case.operands[0].shape)}
    if len(set(lengths)) > 1:
        sizes |= {f"s{i}": length for i, length in enumerate(lengths)}
        results = [(*dims[:dim], (f"s{i}",), *dims[dim + 1 :]) for i in range(len(lengths))]
        keep = {f"d{dim}": f"is split into parts of {', '.join(map(str, lengths))}"}
        return solve(case, Factors((dims,), tuple(results), sizes, each(0), keep, moves=True))
    sizes |= {"n": len(lengths), "b": lengths[0]}
    operand_dims: Dims = (*dims[:dim], ("n", "b"), *dims[dim + 1 :])
    result: Dims = (*dims[:dim], ("b",), *dims[dim + 1 :])
    keep = {"n": f"is split into {len(lengths)} parts"}

    def local(op: LocalOp) -> Any:
        own = shape_of(op.operands[0])[dim] // len(lengths)
        tensor = op.arguments["self"]
        return op.emit(_ATEN.split_with_sizes.default, tensor, [own] * len(lengths), dim)

    factors = Factors((operand_dims,), (result,) * len(lengths), sizes, each(0), keep, moves=True)
    return solve(case, factors, local=local)


def _unbind(case: Case) -> Answer:
    dim, dims = _dim(case), named(case.operands[0].shape)
    sizes = {f"d{i}": size for i, size in enumerate(case.operands[0].shape)}
    result = (*dims[:dim], *dims[dim + 1 :])
    keep = {f"d{dim}": "is taken apart"}
    results = (result,) * len(case.shapes)
    return solve(case, Factors((dims,), results, sizes, each(0), keep, moves=True))


def _halves(case: Case, both: Sequence[bool], result: bool) -> Answer:
    """Lay out an op in which one half of a dimension gates the other: it may be cut as two blocks.

    Args:
        case: the op.
        both: for each operand, whether it has both halves, or the size of one.
        result: whether the result has both halves.
    """
    shape = case.operands[-1].shape
    dim = dim_of(case["dim"], len(shape))
    dims = named(shape)
    forms = {
        True: (*dims[:dim], ("n", "b"), *dims[dim + 1 :]),
        False: (*dims[:dim], ("b",), *dims[dim + 1 :]),
    }
    sizes = {f"d{i}": size for i, size in enumerate(shape)} | {"n": 2, "b": shape[dim] // 2}
    linear = each(0) if result else ()
    operand_dims = tuple(forms[has_both] for has_both in both)
    keep = {"n": "is two halves"}
    return solve(case, Factors(operand_dims, (forms[result],), sizes, linear, keep))


def _select_scatter(case: Case) -> Answer:
    dims, dim = named(case.shape()), dim_of(case["dim"], len(case.shape()))
    sizes = {f"d{i}": size for i, size in enumerate(case.shape())}
    keep = {dims[dim][0]: "has one index replaced"}
    operand_dims = (dims, (*dims[:dim], *dims[dim + 1 :]))
    return solve(case, Factors(operand_dims, (dims,), sizes, jointly(0, 1), keep, moves=True))


def _slice_scatter(case: Case) -> Answer:
    dims, dim = named(case.shape()), dim_of(case["dim"], len(case.shape()))
    sizes = {f"d{i}": size for i, size in enumerate(case.shape())}
    sizes["s"] = case["src"].shape[dim]
    keep = dict.fromkeys((dims[dim][0], "s"), "has a slice replaced")
    operand_dims = (dims, (*dims[:dim], ("s",), *dims[dim + 1 :]))
    return solve(case, Factors(operand_dims, (dims,), sizes, jointly(0, 1), keep, moves=True))


RULES: Mapping[object, Rule] = {
    _ATEN.cat.default: _cat,
    _ATEN.stack.default: _stack,
    **dict.fromkeys(
        (_ATEN.split.Tensor, _ATEN.split_with_sizes.default, _ATEN.unsafe_split.Tensor), _split
    ),
    _ATEN.unbind.int: _unbind,
    _ATEN.glu.default: partial(_halves, both=(True,), result=False),
    _ATEN.glu_backward.default: partial(_halves, both=(False, True), result=True),
    _ATEN.select_scatter.default: _select_scatter,
    _ATEN.slice_scatter.default: _slice_scatter,
}
