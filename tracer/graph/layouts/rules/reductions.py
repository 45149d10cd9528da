"""Rules of reductions. Over a cut dimension, a sum leaves summands, and a maximum leaves maxima.

Along a cut dimension, a softmax is expanded to a maximum, a sum of exponentials and pointwise ops.
The maximum and the sum become reductions over ranks, in the accumulation type. Megatron-LM's
vocabulary-parallel cross entropy does the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .....ir.attributes import ReduceOp
from .....ir.layout import shape_of, volume
from ..cases import Answer, Case, Expansion, LocalOp, Rule, dim_of, dims_of
from ..factors import NOT_LINEAR, Dims, Factors, Linear, each
from ..solution import solve
from ..values.accumulation import accumulated, accumulation_type
from .views import named

_ATEN = torch.ops.aten


def reduced(
    case: Case,
    dims: tuple[int, ...],
    reduce: ReduceOp | None,
    linear: Linear = NOT_LINEAR,
    why: str = "is reduced",
) -> Answer:
    """Lay out a reduction of the one operand; all results have the same shape.

    Args:
        case: the op.
        dims: the dimensions that are reduced.
        reduce: the reduction of the pieces' results; None if the dimensions must be whole.
        linear: `each(0)` if the op is linear.
        why: for messages, why the dimensions must be whole.
    """
    shape = case.operands[0].shape
    operand_dims = named(shape)
    keepdim = len(case.shape()) == len(shape)
    result_dims: Dims = tuple(
        () if i in dims else dim for i, dim in enumerate(operand_dims) if keepdim or i not in dims
    )
    keep = {operand_dims[i][0]: why for i in dims} if reduce is None else {}
    sizes = {f"d{i}": size for i, size in enumerate(shape)}
    results = (result_dims,) * len(case.shapes)
    return solve(case, Factors((operand_dims,), results, sizes, linear, keep, reduce))


def _dims(case: Case) -> tuple[int, ...]:
    return dims_of(case.arguments.get("dim"), len(case.operands[0].shape))


def _sum(case: Case) -> Answer | Expansion:
    dims = _dims(case)
    if _is_rounded(case, dims):
        return Expansion(partial(_sum_of, dims, _keepdim(case)))
    return reduced(case, dims, ReduceOp.SUM, each(0))


def _keepdim(case: Case) -> bool:
    return len(case.shape()) == len(case.operands[0].shape)


def _is_rounded(case: Case, dims: tuple[int, ...]) -> bool:
    """True if ranks would round their summands: they have to sum in a wider type first."""
    (operand,) = case.operands
    dtype = case["dtype"] or operand.dtype
    return case.has_cut(operand, *dims) and accumulation_type(dtype) is not dtype


def _sum_of(
    dims: tuple[int, ...], keep: bool, *, self: torch.Tensor, dtype: Any, **_: Any
) -> torch.Tensor:
    return self.sum(dims, keepdim=keep, dtype=accumulation_type(dtype or self.dtype))


def _extreme(reduce: ReduceOp, case: Case) -> Answer:
    return replace(reduced(case, _dims(case), reduce), local=partial(_local_extreme, reduce))


def _multiplied(case: Case) -> Answer | Expansion:
    dims = _dims(case)
    if _is_rounded(case, dims):
        return Expansion(_product_of)
    return reduced(case, dims, ReduceOp.PROD)


def _product_of(*, self: torch.Tensor, dtype: Any, **along: Any) -> torch.Tensor:
    return self.prod(**along, dtype=accumulation_type(dtype or self.dtype))


def _local_extreme(reduce: ReduceOp, op: LocalOp) -> Any:
    """The extreme of a piece; of an empty piece, the neutral element of the reduction."""
    region = op.results[0]
    assert region is not None
    if volume(op.operands[0]) or not volume(region):
        return op.run()
    tensor = op.arguments["self"]
    limit = _least if reduce is ReduceOp.MAX else _greatest
    value = limit(tensor.meta["val"].dtype)
    return op.emit(_ATEN.new_full.default, tensor, list(shape_of(region)), value)


def _least(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point:
        return -math.inf
    return 0 if dtype is torch.bool else torch.iinfo(dtype).min


def _greatest(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point:
        return math.inf
    return 1 if dtype is torch.bool else torch.iinfo(dtype).max


def _mean(case: Case) -> Answer | Expansion:
    """Over a cut dimension: the sum, divided by the count of all entries."""
    dims = _dims(case)
    (operand,) = case.operands
    if case.has_cut(operand, *dims):
        count = math.prod(operand.shape[i] for i in dims)
        return Expansion(partial(_mean_of, dims, count, _keepdim(case)))
    return reduced(case, dims, ReduceOp.SUM, each(0))


def _mean_of(
    dims: tuple[int, ...], count: int, keep: bool, *, self: torch.Tensor, dtype: Any, **_: Any
) -> torch.Tensor:
    return _sum_of(dims, keep, self=self, dtype=dtype) / count


def _variance(case: Case) -> Answer | Expansion:
    """Over a cut dimension: two passes, for the mean and for the sum of squares."""
    dims = _dims(case)
    (operand,) = case.operands
    if case.has_cut(operand, *dims):
        return Expansion(partial(_variance_of, dims, _keepdim(case), case.target))
    return reduced(case, dims, None)


def _variance_of(
    dims: tuple[int, ...], keep: bool, target: Any, *, self: torch.Tensor, correction: Any, **_: Any
) -> Any:
    count = math.prod(self.shape[i] for i in dims)
    wide = accumulated(self)
    mean = wide.sum(dims, keepdim=True) / count
    squares = _magnitude(wide - mean).square().sum(dims, keepdim=keep)
    variance = squares / max(count - (1 if correction is None else correction), 0)
    result = variance.sqrt() if target in _DEVIATIONS else variance
    if target in _WITH_MEAN:
        return result, mean if keep else mean.squeeze(dims)
    return result


def _magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """The real numbers to square: absolute values of complex numbers, else the numbers."""
    return tensor.abs() if tensor.is_complex() else tensor


_DEVIATIONS = (_ATEN.std.correction, _ATEN.std_mean.correction)
_WITH_MEAN = (_ATEN.var_mean.correction, _ATEN.std_mean.correction)


def _norm(case: Case) -> Answer | Expansion:
    """Over a cut dimension: the root of a sum of powers."""
    dims = _dims(case)
    (operand,) = case.operands
    order = case["ord"]
    if case.has_cut(operand, *dims) and 0 < order < math.inf:
        return Expansion(partial(_norm_of, dims, _keepdim(case)))
    if order != math.inf:
        return reduced(case, dims, None)
    return replace(reduced(case, dims, ReduceOp.MAX), local=_local_highest)


def _local_highest(op: LocalOp) -> Any:
    region = op.results[0]
    assert region is not None
    if volume(op.operands[0]) or not volume(region):
        return op.run()
    shape, dtype = list(shape_of(region)), op.fakes[0].dtype
    return op.emit(_ATEN.new_zeros.default, op.arguments["self"], shape, dtype=dtype)


def _norm_of(
    dims: tuple[int, ...], keep: bool, *, self: torch.Tensor, ord: float, dtype: Any, **_: Any
) -> torch.Tensor:
    wide = accumulated(self if dtype is None else self.to(dtype))
    if ord == 2:
        return _magnitude(wide).square().sum(dims, keepdim=keep).sqrt()
    return wide.abs().pow(ord).sum(dims, keepdim=keep).pow(1 / ord)


def _logsumexp(case: Case) -> Answer | Expansion:
    dims = _dims(case)
    (operand,) = case.operands
    if case.has_cut(operand, *dims):
        return Expansion(partial(_logsumexp_of, dims, _keepdim(case)))
    return reduced(case, dims, None)


def _logsumexp_of(
    dims: tuple[int, ...], keep: bool, *, self: torch.Tensor, **_: Any
) -> torch.Tensor:
    wide = accumulated(self) if self.is_floating_point() else self.to(torch.get_default_dtype())
    highest = wide.amax(dims, keepdim=True)
    # Infinity minus infinity is NaN. Exponentials of such a row are 0 or infinite without a shift.
    shift = torch.where(highest.isinf(), 0, highest)
    total = (wide - shift).exp().sum(dims, keepdim=True).log() + shift
    return total if keep else total.squeeze(dims)


def _along(case: Case) -> Answer:
    """An op that needs all entries along a dimension, in their order."""
    shape = case.operands[0].shape
    dims = named(shape)
    dim = dim_of(case["dim"], len(shape))
    linear = each(0) if case.target is _ATEN.cumsum.default else NOT_LINEAR
    sizes = {f"d{i}": size for i, size in enumerate(shape)}
    keep = {f"d{dim}": "is needed whole, since the op works along it"}
    results = []
    for number, result_shape in enumerate(case.shapes):
        assert result_shape is not None
        own = (
            dims
            if result_shape[dim : dim + 1] == shape[dim : dim + 1]
            else _other(dims, dim, number)
        )
        sizes[f"r{number}"] = result_shape[dim] if result_shape else 1
        results.append(own)
    if not shape:
        results = [() for _ in case.shapes]
    return solve(case, Factors((dims,), tuple(results), sizes, linear, keep))


def _other(dims: Dims, dim: int, number: int) -> Dims:
    return (*dims[:dim], (f"r{number}",), *dims[dim + 1 :])


def _chosen(case: Case) -> Answer:
    """An op that gives the index of an entry: the dimension has to be whole."""
    return reduced(case, _dims(case), None, why="is needed whole, to find the index in it")


def _decided(reduce: ReduceOp, case: Case) -> Answer | Expansion:
    """`all` or `any`: over a cut dimension, the least or the greatest of zeros and ones."""
    dims = _dims(case)
    (operand,) = case.operands
    if case.has_cut(operand, *dims):
        return Expansion(partial(_decided_of, reduce, dims, _keepdim(case)))
    return reduced(case, dims, None)


def _decided_of(
    reduce: ReduceOp, dims: tuple[int, ...], keep: bool, *, self: torch.Tensor, **_: Any
) -> torch.Tensor:
    numbers = (self != 0).to(torch.uint8)
    result = numbers.amin(dims, keep) if reduce is ReduceOp.MIN else numbers.amax(dims, keep)
    return result.to(torch.uint8 if self.dtype is torch.uint8 else torch.bool)


def _histogram(case: Case) -> Answer:
    """Counts of pieces add up, unless the edges of the bins are the extremes of all entries."""
    (operand,) = case.operands
    dims = named(operand.shape)
    sizes = {f"d{i}": size for i, size in enumerate(operand.shape)} | {"bins": case["bins"]}
    has_edges = case["min"] != case["max"]
    why = "is needed whole, since its extremes are the edges of the bins"
    keep = {} if has_edges else dict.fromkeys((dim for (dim,) in dims), why)
    return solve(case, Factors((dims,), ((("bins",),),), sizes, NOT_LINEAR, keep))


def _softmax_along(expanded: Any, case: Case) -> Answer | Expansion:
    """An op along a dimension; if the dimension is cut, `expanded` replaces the op."""
    first = case.operands[0]
    dim = dim_of(case["dim"], len(first.shape))
    if any(case.has_cut(operand, dim) for operand in case.operands if operand.shape):
        return Expansion(expanded)
    dims = named(first.shape)
    sizes = {f"d{i}": size for i, size in enumerate(first.shape)}
    keep = {f"d{dim}": "is normalized"}
    return solve(case, Factors((dims,) * len(case.operands), (dims,), sizes, (), keep))


def _softmax(*, self: torch.Tensor, dim: int, half_to_float: bool = False) -> torch.Tensor:
    powers = (accumulated(self) - self.amax(dim, keepdim=True)).exp()
    return powers / powers.sum(dim, keepdim=True)


def _log_softmax(*, self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    shifted = accumulated(self) - self.amax(dim, keepdim=True)
    return shifted - shifted.exp().sum(dim, keepdim=True).log()


def _softmax_backward(
    *, grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    wide = accumulated(output)
    product = grad_output * wide
    return product - wide * product.sum(dim, keepdim=True)


def _log_softmax_backward(
    *, grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    wide = accumulated(grad_output)
    return wide - accumulated(output).exp() * wide.sum(dim, keepdim=True)


def _safe_softmax(case: Case) -> Answer | Expansion:
    dims = named(case.operands[0].shape)
    sizes = {f"d{i}": size for i, size in enumerate(case.shape())}
    dim = dim_of(case["dim"], len(dims))
    return solve(case, Factors((dims,), (dims,), sizes, (), {f"d{dim}": "is normalized"}))


RULES: Mapping[object, Rule] = {
    **dict.fromkeys((_ATEN.sum.default, _ATEN.sum.dim_IntList), _sum),
    **dict.fromkeys((_ATEN.mean.default, _ATEN.mean.dim), _mean),
    **dict.fromkeys((_ATEN.amax.default, _ATEN.max.default), partial(_extreme, ReduceOp.MAX)),
    **dict.fromkeys((_ATEN.amin.default, _ATEN.min.default), partial(_extreme, ReduceOp.MIN)),
    **dict.fromkeys((_ATEN.prod.default, _ATEN.prod.dim_int), _multiplied),
    **dict.fromkeys((_ATEN.var.correction, _ATEN.std.correction), _variance),
    **dict.fromkeys((_ATEN.var_mean.correction, _ATEN.std_mean.correction), _variance),
    _ATEN.linalg_vector_norm.default: _norm,
    _ATEN.logsumexp.default: _logsumexp,
    **dict.fromkeys((_ATEN.argmax.default, _ATEN.argmin.default), _chosen),
    **dict.fromkeys((_ATEN.max.dim, _ATEN.min.dim, _ATEN.aminmax.default), _chosen),
    **dict.fromkeys((_ATEN.median.dim, _ATEN.mode.default, _ATEN.kthvalue.default), _chosen),
    **dict.fromkeys(
        (_ATEN.any.default, _ATEN.any.dim, _ATEN.any.dims), partial(_decided, ReduceOp.MAX)
    ),
    **dict.fromkeys(
        (_ATEN.all.default, _ATEN.all.dim, _ATEN.all.dims), partial(_decided, ReduceOp.MIN)
    ),
    **dict.fromkeys((_ATEN.cumsum.default, _ATEN.cumprod.default), _along),
    **dict.fromkeys(
        (_ATEN.cummax.default, _ATEN.cummin.default, _ATEN.logcumsumexp.default), _along
    ),
    **dict.fromkeys(
        (_ATEN.sort.default, _ATEN.sort.stable, _ATEN.topk.default, _ATEN.argsort.default), _along
    ),
    _ATEN.histc.default: _histogram,
    _ATEN._softmax.default: partial(_softmax_along, _softmax),
    _ATEN._log_softmax.default: partial(_softmax_along, _log_softmax),
    _ATEN._softmax_backward_data.default: partial(_softmax_along, _softmax_backward),
    _ATEN._log_softmax_backward_data.default: partial(_softmax_along, _log_softmax_backward),
    _ATEN._safe_softmax.default: _safe_softmax,
}
