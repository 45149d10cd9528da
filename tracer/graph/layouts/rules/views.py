"""Rules of views: the same entries under other indices, with dimensions as products of factors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from .....ir.layout import shape_of
from ..cases import Answer, Case, Expansion, LocalOp, Rule, Shape, dim_of, dims_of
from ..cuts import is_interval
from ..factors import NOT_LINEAR, Dim, Dims, Factors, each
from ..solution import solve

_ATEN = torch.ops.aten
_SIZE = {"size": 0}


def named(shape: Shape, prefix: str = "d") -> Dims:
    """Dimensions with a factor for each: `d0`, `d1` and so on."""
    return tuple((f"{prefix}{i}",) for i in range(len(shape)))


def moved(
    case: Case,
    operand: Dims,
    result: Dims,
    keep: Mapping[str, str] | None = None,
    sizes: Mapping[str, int] | None = None,
    local: Any = None,
    more: Mapping[str, int] | None = None,
) -> Answer:
    """Lay out an op of one operand that only moves entries.

    Args:
        case: the op.
        operand, result: the dimensions of the operand and of the result.
        keep: factors that must be whole, with the reason.
        sizes, local: as in `Answer`.
        more: the sizes of factors that are no dimension by themselves.
    """
    factor_sizes = dict(more or {})
    for dims, shape in ((operand, case.operands[0].shape), (result, case.shape())):
        for dim, size in zip(dims, shape, strict=True):
            if len(dim) == 1:
                factor_sizes[dim[0]] = size
    factors = Factors((operand,), (result,), factor_sizes, each(0), keep or {}, moves=True)
    return solve(case, factors, sizes=sizes, local=local)


def view(case: Case) -> Answer:
    """A reshape: both shapes are products of common factors."""
    operand_shape, result_shape = case.operands[0].shape, case.shape()
    operand, result, sizes, keep = common_factors(operand_shape, result_shape)
    factors = Factors((operand,), (result,), sizes, each(0), keep, moves=True)
    return solve(case, factors, sizes=_SIZE)


def common_factors(
    operand: Shape, result: Shape
) -> tuple[Dims, Dims, dict[str, int], dict[str, str]]:
    """The dimensions of two shapes of one size as products of common factors.

    Returns:
        The dimensions of both shapes, the sizes of the factors, and the factors that cannot be cut,
        with the reason.
    """
    sizes: dict[str, int] = {}
    keep: dict[str, str] = {}
    both: tuple[list[Dim], list[Dim]] = ([], [])
    for operand_run, result_run in _groups(operand, result):
        bounds = sorted({*_bounds(operand_run), *_bounds(result_run)}, reverse=True)
        if all(low and high % low == 0 for high, low in itertools.pairwise(bounds)):
            names = {}
            for high, low in itertools.pairwise(bounds):
                names[low] = f"f{len(sizes)}"
                sizes[names[low]] = high // low
            both[0].extend(_dims(operand_run, names))
            both[1].extend(_dims(result_run, names))
            continue
        for shape, dims in ((operand_run, both[0]), (result_run, both[1])):
            for size in shape:
                name = f"f{len(sizes)}"
                sizes[name] = size
                keep[name] = (
                    f"is viewed as {_text(result_run)}, which has no factor in common with "
                    f"{_text(operand_run)}"
                )
                dims.append((name,))
    return tuple(both[0]), tuple(both[1]), sizes, keep


def _groups(before: Shape, after: Shape) -> list[tuple[Shape, Shape]]:
    """The shortest runs of dimensions of both shapes that have the same number of entries."""
    groups, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        first, second = i, j
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while math.prod(before[first:i]) != math.prod(after[second:j]):
            if i < len(before) and (
                j == len(after) or math.prod(before[first:i]) < math.prod(after[second:j])
            ):
                i += 1
            elif j < len(after):
                j += 1
            else:  # a dimension of 0: nothing is known of the rest
                i, j = len(before), len(after)
                break
        groups.append((before[first:i], after[second:j]))
    return groups


def _bounds(shape: Shape) -> list[int]:
    return [math.prod(shape[i:]) for i in range(len(shape) + 1)]


def _dims(shape: Shape, names: Mapping[int, str]) -> list[Dim]:
    bounds = _bounds(shape)
    return [
        tuple(name for low, name in names.items() if inner <= low < outer)
        for outer, inner in itertools.pairwise(bounds)
    ]


def _text(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "1"


def _permuted(case: Case, order: Sequence[int]) -> Answer:
    dims = named(case.operands[0].shape)
    return moved(case, dims, tuple(dims[i] for i in order))


def _permute(case: Case) -> Answer:
    rank = len(case.operands[0].shape)
    return _permuted(case, [dim_of(dim, rank) for dim in case["dims"]])


def _transpose(case: Case) -> Answer:
    rank = len(case.operands[0].shape)
    order = list(range(rank))
    if rank:
        first, second = dim_of(case["dim0"], rank), dim_of(case["dim1"], rank)
        order[first], order[second] = second, first
    return _permuted(case, order)


def _t(case: Case) -> Answer:
    return _permuted(case, range(len(case.operands[0].shape))[::-1])


def _unsqueeze(case: Case) -> Answer:
    dims = named(case.operands[0].shape)
    dim = dim_of(case["dim"], len(dims) + 1)
    return moved(case, dims, (*dims[:dim], (), *dims[dim:]))


def _squeeze(case: Case) -> Answer:
    shape = case.operands[0].shape
    dims = named(shape)
    asked = set(dims_of(case.arguments.get("dim"), len(shape)))
    gone = [i for i, size in enumerate(shape) if size == 1 and i in asked]
    keep = {dims[i][0]: "is squeezed out" for i in gone}
    left = tuple(d for i, d in enumerate(dims) if i not in gone)

    def local(op: LocalOp) -> Any:  # a piece may have size 1 where the whole tensor has more
        return op.emit(_ATEN.squeeze.dims, op.arguments["self"], gone)

    return moved(case, dims, left, keep, local=local)


def _expand(case: Case) -> Answer:
    operand_shape, result_shape = case.operands[0].shape, case.shape()
    first = len(result_shape) - len(operand_shape)
    result = named(result_shape)
    operand = tuple(
        result[first + i] if size == result_shape[first + i] else ()
        for i, size in enumerate(operand_shape)
    )
    return moved(case, operand, result, sizes=_SIZE)


def _repeat(case: Case) -> Answer:
    operand_shape, result_shape = case.operands[0].shape, case.shape()
    first = len(result_shape) - len(operand_shape)
    operand = named(operand_shape)
    result = tuple(
        (f"r{i}", *(operand[i - first] if i >= first else ())) for i in range(len(result_shape))
    )
    counts = {f"r{i}": times for i, times in enumerate(case["repeats"])}
    return moved(case, operand, result, more=counts)


def _select_backward(case: Case) -> Answer:
    result = named(case.shape())
    dim = dim_of(case["dim"], len(result))
    return moved(case, (*result[:dim], *result[dim + 1 :]), result, sizes={"input_sizes": 0})


def _slice(case: Case) -> Answer:
    """A slice of a whole dimension, of all entries, or of whole blocks of a dimension's cut."""
    (operand,) = case.operands
    dims = named(operand.shape)
    dim = dim_of(case["dim"], len(dims))
    size, length = operand.shape[dim], case.shape()[dim]
    if size == length:
        return moved(case, dims, dims, local=_whole_slice)
    start = slice(case["start"], case["end"], case["step"]).indices(size)[0]
    block = size // operand.cuts[dim].blocks
    if operand.cuts[dim] and case["step"] == 1 and start % block == length % block == 0:
        return _packed_slice(case, dim, block, start)
    keep = {dims[dim][0]: f"is sliced to {length} of {size}"}
    return moved(case, dims, (*dims[:dim], ("s",), *dims[dim + 1 :]), keep)


def _whole_slice(op: LocalOp) -> Any:
    return op.run(start=None, end=None)


def _packed_slice(case: Case, dim: int, block: int, start: int) -> Answer:
    operand, result_shape = case.operands[0], case.shape()
    dims = named(operand.shape)
    operand_dims = (*dims[:dim], ("q", "b"), *dims[dim + 1 :])
    result = (*dims[:dim], ("s", "b"), *dims[dim + 1 :])
    number, chosen = operand.shape[dim] // block, result_shape[dim] // block
    more = {"q": number, "s": chosen, "b": block}

    def local(op: LocalOp) -> Any:
        piece_block = shape_of(op.operands[0])[dim] // number
        first = start // block * piece_block
        return op.run(start=first, end=first + chosen * piece_block)

    return moved(case, operand_dims, result, {"q": "is sliced"}, local=local, more=more)


def _slice_backward(case: Case) -> Answer:
    """Zeros around a slice: it fills the dimension, is made of whole blocks, or is summed up."""
    operand, result_shape = case.operands[0], case.shape()
    dim = dim_of(case["dim"], len(result_shape))
    size, total = operand.shape[dim], result_shape[dim]
    result = named(result_shape)
    if size == total:
        return moved(case, result, result, sizes={"input_sizes": 0}, local=_whole_slice_backward)
    start = slice(case["start"], case["end"], case["step"]).indices(total)[0]
    cut = operand.cuts[dim]
    block = size // cut.blocks
    if cut and case["step"] == 1 and block and start % block == total % block == 0:
        return _packed_slice_backward(case, dim, block, start)
    operand_dims = (*result[:dim], ("s",), *result[dim + 1 :])
    return moved(case, operand_dims, result, local=partial(_put, dim, start))


def _put(dim: int, start: int, op: LocalOp) -> Any:
    """The rank's indices of the slice, where they are in the whole; zeros elsewhere: a summand."""
    (region,), step = op.operands, op.arguments["step"]
    assert op.results[0] is not None
    sizes, total, at = list(shape_of(op.results[0])), None, 0
    for first, stop in region[dim] or ((0, 0),):
        own = op.arguments["grad_output"]
        if len(region[dim]) > 1:
            own = op.emit(_ATEN.slice.Tensor, own, dim, at, at := at + stop - first)
        begin = start + first * step
        end = begin + (stop - first - 1) * step + 1 if first < stop else begin
        placed = op.run(grad_output=own, input_sizes=sizes, start=begin, end=end)
        total = placed if total is None else op.emit(_ATEN.add.Tensor, total, placed)
    return total


def _whole_slice_backward(op: LocalOp) -> Any:
    result = op.results[0]
    assert result is not None
    return op.run(input_sizes=list(shape_of(result)), start=0, end=2**63 - 1)


def _packed_slice_backward(case: Case, dim: int, block: int, start: int) -> Answer:
    operand, result_shape = case.operands[0], case.shape()
    dims = named(result_shape)
    operand_dims = (*dims[:dim], ("s", "b"), *dims[dim + 1 :])
    result = (*dims[:dim], ("q", "b"), *dims[dim + 1 :])
    number, chosen = result_shape[dim] // block, operand.shape[dim] // block
    more = {"q": number, "s": chosen, "b": block}

    def local(op: LocalOp) -> Any:
        region = op.results[0]
        assert region is not None
        shape = shape_of(region)
        first = start // block * (shape[dim] // number)
        end = first + chosen * (shape[dim] // number)
        return op.run(input_sizes=list(shape), start=first, end=end)

    return moved(
        case, operand_dims, result, {"s": "is put into a larger one"}, local=local, more=more
    )


def _flip(case: Case) -> Answer:
    dims = named(case.operands[0].shape)
    gone = dims_of(case["dims"], len(dims)) if case["dims"] else ()
    return moved(case, dims, dims, {dims[i][0]: "has its indices reversed" for i in gone})


def _roll(case: Case) -> Answer:
    dims = named(case.operands[0].shape)
    gone = dims_of(case["dims"], len(dims))
    if not case["dims"]:  # it rolls the flat tensor
        gone = tuple(range(len(dims)))
    return moved(case, dims, dims, {dims[i][0]: "has its indices moved" for i in gone})


def _pad(case: Case) -> Answer:
    operand_shape, result_shape = case.operands[0].shape, case.shape()
    padded = case["pad"]
    dims = named(operand_shape)
    changed = {len(operand_shape) - 1 - i // 2 for i, amount in enumerate(padded) if amount}
    result = tuple((f"p{i}",) if i in changed else dim for i, dim in enumerate(dims))
    sizes = {f"p{i}": result_shape[i] for i in changed} | {
        f"d{i}": n for i, n in enumerate(operand_shape)
    }
    keep = {dims[i][0]: "is padded" for i in changed}
    linear = each(0) if case["value"] == 0 else ()
    return solve(case, Factors((dims,), (result,), sizes, linear, keep))


def _triangle(case: Case) -> Answer:
    """The entries above or below a diagonal, which has another offset in each piece."""
    dims = named(case.operands[0].shape)
    rows, columns = case.operands[0].cuts[-2:]
    packed = {
        dims[i][0]: "is packed, and its pieces have several diagonals"
        for i, cut in ((-2, rows), (-1, columns))
        if not is_interval(cut)
    }
    return moved(case, dims, dims, packed, local=_local_triangle)


def _local_triangle(op: LocalOp) -> Any:
    *_, rows, columns = op.operands[0]
    row, column = (dim[0][0] if dim else 0 for dim in (rows, columns))
    return op.run(diagonal=op.arguments["diagonal"] + row - column)


def _diagonal(case: Case) -> Answer:
    shape = case.operands[0].shape
    dims, diagonal, gone = _diagonals(case, shape)
    keep = {dims[i][0]: "has its diagonal taken" for i in gone}
    return moved(case, dims, diagonal, keep)


def _diagonal_backward(case: Case) -> Answer:
    dims, diagonal, _ = _diagonals(case, case.shape())
    return moved(case, diagonal, dims, {"n": "is a diagonal"}, sizes={"input_sizes": 0})


def _diagonals(case: Case, shape: Shape) -> tuple[Dims, Dims, tuple[int, int]]:
    """The dimensions of a tensor and of its diagonals; and the two that a diagonal runs through.

    The entries of a diagonal are the last dimension.
    """
    gone = dim_of(case["dim1"], len(shape)), dim_of(case["dim2"], len(shape))
    dims = named(shape)
    return dims, (*(d for i, d in enumerate(dims) if i not in gone), ("n",)), gone


def _strided(case: Case) -> Answer | Expansion:
    """A permutation of a contiguous tensor, written as strides: a reshape and a permute."""
    (operand,) = case.operands
    fake = operand.node.meta["val"]
    size, stride = list(case["size"]), list(case["stride"])
    order = sorted(range(len(size)), key=lambda i: (-stride[i], -size[i]))
    dense = [math.prod(size[j] for j in order[n + 1 :]) for n in range(len(order))]
    fits = all(size[i] == 1 or stride[i] == dense[n] for n, i in enumerate(order))
    offset = case["storage_offset"]
    if not fake.is_contiguous() or offset or math.prod(size) != fake.numel() or not fits:
        raise case.error(
            f"it takes strides {stride} of memory, of which ranks hold pieces",
            "use view, permute or slices, which say what they take in indices",
        )
    back = [order.index(i) for i in range(len(order))]
    return Expansion(partial(_reshaped, [size[i] for i in order], back))


def _reshaped(shape: list[int], order: list[int], *, self: torch.Tensor, **_: Any) -> torch.Tensor:
    return self.view(shape).permute(order)


def _view_dtype(case: Case) -> Answer:
    """Other numbers for the same bits, of which no sum over ranks can be made.

    Of another width, the last dimension has other entries.
    """
    before, after = case.operands[0].shape, case.shape()
    dims = named(before)
    result, keep = dims, {}
    sizes = {dim[0]: size for dim, size in zip(dims, before, strict=True)}
    if before != after:
        result, sizes["w"] = (*dims[:-1], ("w",)), after[-1]
        keep = dict.fromkeys(("w", dims[-1][0]), f"is viewed as {case['dtype']}")
    return solve(case, Factors((dims,), (result,), sizes, NOT_LINEAR, keep))


def _view_as_real(case: Case) -> Answer:
    return moved(case, dims := named(case.operands[0].shape), (*dims, ("parts",)))


def _view_as_complex(case: Case) -> Answer:
    dims = named(case.operands[0].shape)
    return moved(case, dims, dims[:-1], {dims[-1][0]: "has real and imaginary parts"})


RULES: Mapping[object, Rule] = {
    **dict.fromkeys((_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default), view),
    _ATEN.permute.default: _permute,
    _ATEN.transpose.int: _transpose,
    _ATEN.t.default: _t,
    _ATEN.unsqueeze.default: _unsqueeze,
    **dict.fromkeys((_ATEN.squeeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims), _squeeze),
    _ATEN.expand.default: _expand,
    _ATEN.repeat.default: _repeat,
    _ATEN.select_backward.default: _select_backward,
    _ATEN.slice.Tensor: _slice,
    _ATEN.slice_backward.default: _slice_backward,
    _ATEN.flip.default: _flip,
    _ATEN.roll.default: _roll,
    _ATEN.constant_pad_nd.default: _pad,
    **dict.fromkeys((_ATEN.tril.default, _ATEN.triu.default), _triangle),
    _ATEN.diagonal.default: _diagonal,
    _ATEN.diagonal_backward.default: _diagonal_backward,
    _ATEN.as_strided.default: _strided,
    _ATEN.view.dtype: _view_dtype,
    _ATEN.view_as_real.default: _view_as_real,
    _ATEN.view_as_complex.default: _view_as_complex,
}

SELECTING: frozenset[object] = frozenset(
    {
        *(_ATEN.select_backward.default, _ATEN.slice.Tensor, _ATEN.slice_backward.default),
        *(_ATEN.constant_pad_nd.default, _ATEN.tril.default, _ATEN.triu.default),
        *(_ATEN.repeat.default, _ATEN.diagonal.default, _ATEN.diagonal_backward.default),
        _ATEN.view.dtype,
    }
)
"""The views that leave entries out, add some, or see other numbers in them."""
