"""Rules of ops that take entries by tensors of indices: embeddings, gather, index, scatter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from .....ir.layout import Region, shape_of, whole
from ..cases import Answer, Case, Expansion, LocalOp, Operand, Rule, Shape, dim_of
from ..cuts import is_interval
from ..factors import Dim, Dims, Factors, Linear, each, jointly, solve
from ..values.ids import CHECKED_IDS
from .creation import counting
from .pointwise import pointwise
from .views import named

_ATEN = torch.ops.aten


def _checked_ids(case: Case) -> Answer:
    return replace(pointwise(case), local=_local_checked)


def _local_checked(op: LocalOp) -> Any:
    return op.run(first=_first(op.operands[0]))


def _first(region: Region) -> list[int]:
    """The indices of a piece's first entry; empty if its entries lie apart."""
    if any(len(intervals) > 1 for intervals in region):
        return []
    return [intervals[0][0] if intervals else 0 for intervals in region]


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


def _rows(intervals: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The first row of a piece, and their number."""
    return (intervals[0][0], intervals[0][1] - intervals[0][0]) if intervals else (0, 0)


def _local_embedding(vocabulary: int, op: LocalOp) -> Any:
    first, count = _rows(op.operands[0][0])
    if count == vocabulary:
        return op.run()
    region = op.results[0]
    assert region is not None
    weight, indices = op.arguments["weight"], op.arguments["indices"]
    if not count:
        return op.emit(_ATEN.new_zeros.default, weight, list(shape_of(region)))
    place = _first(op.operands[1])
    indices = op.emit(CHECKED_IDS, indices, vocabulary, None, "embedding", place)
    safe, inside = _within(op, indices, first, count)
    rows = op.emit(_ATEN.embedding.default, weight, safe)
    mask = op.emit(_ATEN.unsqueeze.default, inside, -1)
    return op.emit(_ATEN.where.ScalarOther, mask, rows, 0)


def _within(op: LocalOp, indices: Any, first: int, count: int) -> tuple[Any, Any]:
    """Indices into a rank's rows, with 0 for rows of other ranks; and a mask of its own rows."""
    own = op.emit(_ATEN.sub.Tensor, indices, first)
    above = op.emit(_ATEN.ge.Scalar, own, 0)
    below = op.emit(_ATEN.lt.Scalar, own, count)
    inside = op.emit(_ATEN.logical_and.default, above, below)
    return op.emit(_ATEN.where.ScalarOther, inside, own, 0), inside


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
    first, count = _rows(region[0])
    if count == shape[0]:
        return op.run()
    grad, indices = op.arguments["grad_output"], op.arguments["indices"]
    if not count:
        return op.emit(_ATEN.new_zeros.default, grad, list(shape_of(region)))
    safe, inside = _within(op, indices, first, count)
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


@dataclass(frozen=True)
class _Indexed:
    """The dimensions of an op that indexes some dimensions of a tensor.

    Attributes:
        source: the dimensions of the tensor.
        result: the dimensions of the indexed entries.
        indices: the dimensions of each index tensor.
        counts: index tensors, by number, that are `arange` of a dimension. On a rank, they become
            `arange` of the piece.
        sizes, keep: as in `Factors`.
    """

    source: Dims
    result: Dims
    indices: tuple[Dims, ...]
    counts: frozenset[int]
    sizes: dict[str, int]
    keep: dict[str, str]


def _indexed(case: Case) -> _Indexed:
    shape = case["self"].shape
    index_tensors = [(k, index) for k, index in enumerate(case["indices"]) if index is not None]
    common = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        *(index.shape for _, index in index_tensors)
    )
    index_dims: Dims = tuple((f"i{n}",) for n in range(len(common)))
    source: list[Dim] = list(named(shape))
    sizes = {f"d{n}": size for n, size in enumerate(shape)}
    sizes |= {f"i{n}": size for n, size in enumerate(common)}
    keep, counts = {}, set()
    for place, (k, index) in enumerate(index_tensors):
        if index.dtype in (torch.bool, torch.uint8):
            raise case.error(
                "it selects entries by a mask, so the size of the result depends on values",
                "use torch.where, which keeps all entries",
            )
        along = _counts(index, shape[k], len(common))
        if along is not None and index_dims[along] not in source:
            source[k] = index_dims[along]
            counts.add(place)
        else:
            keep[f"d{k}"] = "is indexed by a tensor"
    places = [k for k, _ in index_tensors]
    rest = [dim for k, dim in enumerate(source) if k not in places]
    ahead = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    result = (*rest[:ahead], *index_dims, *rest[ahead:])
    indices = tuple(_aligned(index.shape, common) for _, index in index_tensors)
    return _Indexed(tuple(source), result, indices, frozenset(counts), sizes, keep)


def _aligned(shape: Shape, common: Shape) -> Dims:
    first = len(common) - len(shape)
    return tuple(
        (f"i{first + n}",) if size == common[first + n] else () for n, size in enumerate(shape)
    )


def _counts(index: Operand, size: int, rank: int) -> int | None:
    """The dimension of the broadcast index along which it is `arange(size)`; None if it is not.

    Args:
        index: the index tensor.
        size: the size of the dimension that it indexes.
        rank: the number of dimensions of all indices, broadcast.
    """
    if size < 2 or math.prod(index.shape) != size:
        return None
    node = index.node
    while node.target is _ATEN.unsqueeze.default:
        inner = node.args[0]
        assert isinstance(inner, fx.Node)
        node = inner
    forms: dict[object, tuple[tuple[int, ...], ...]] = {
        _ATEN.arange.default: ((size,),),
        _ATEN.arange.start: ((0, size),),
        _ATEN.arange.start_step: ((0, size), (0, size, 1)),
    }
    if node.args not in forms.get(node.target, ()):
        return None
    return rank - len(index.shape) + index.shape.index(size)


def _index(case: Case) -> Answer:
    indexed = _indexed(case)
    operands = (indexed.source, *indexed.indices)
    passive = frozenset(1 + n for n in indexed.counts)
    factors = Factors(
        operands,
        (indexed.result,),
        indexed.sizes,
        each(0),
        indexed.keep,
        moves=True,
        passive=passive,
    )
    return solve(case, factors, local=partial(_local_indices, indexed))


def _index_put(case: Case) -> Answer:
    indexed = _indexed(case)
    values = case["values"].shape
    result = [indexed.sizes[dim[0]] for dim in indexed.result]
    first = len(result) - len(values)
    value_dims = tuple(
        indexed.result[first + n] if size == result[first + n] else ()
        for n, size in enumerate(values)
    )
    keep = dict(indexed.keep)
    for dims in indexed.indices:
        for dim in dims:
            if dim and dim not in indexed.source:
                keep[dim[0]] = "says where values go"
    number = len(indexed.indices)
    passive = frozenset(1 + n for n in indexed.counts)
    factors = Factors(
        (indexed.source, *indexed.indices, value_dims),
        (indexed.source,),
        indexed.sizes,
        jointly(0, number + 1),
        keep,
        passive=passive,
    )
    return solve(case, factors, local=partial(_local_indices, indexed))


def _local_indices(indexed: _Indexed, op: LocalOp) -> Any:
    """Run the op; indices that are `arange` of a dimension become `arange` of its piece."""
    indices = list(op.arguments["indices"])
    source = shape_of(op.operands[0])
    places = [k for k, index in enumerate(indices) if index is not None]
    for place, k in enumerate(places):
        if place in indexed.counts:
            like = indices[k].meta["val"]
            counted = {"dtype": like.dtype, "device": like.device}
            shape = [source[k] if size != 1 else 1 for size in like.shape]
            numbers = op.emit(_ATEN.arange.default, source[k], **counted)
            indices[k] = op.emit(_ATEN.view.default, numbers, shape)
    return op.run(indices=indices)


def _gather(case: Case) -> Answer | Expansion:
    """Along a cut dimension: compare with all indices, and sum, which leaves summands."""
    source, index = case["self"].shape, case["index"].shape
    dim = dim_of(case["dim"], len(source))
    others_agree = source[:dim] + source[dim + 1 :] == index[:dim] + index[dim + 1 :]
    if source and case.has_cut(case["self"], dim) and others_agree:
        return counting(partial(_gathered, dim), case["self"].cuts[dim])
    dims, sizes, keep = _beside(source, index, dim)
    source_dims = tuple((f"d{n}",) for n in range(len(source)))
    return solve(case, Factors((source_dims, dims), (dims,), sizes, each(0), keep, moves=True))


def _gathered(along: int, *, self: torch.Tensor, index: torch.Tensor, **_: Any) -> torch.Tensor:
    last = self.movedim(along, -1).unsqueeze(-2)
    index = CHECKED_IDS(index, self.shape[along], None, "gather")
    positions = index.movedim(along, -1).unsqueeze(-1)
    chosen = positions == torch.arange(self.shape[along], device=self.device)
    return torch.where(chosen, last, 0).sum(-1).movedim(-1, along)


def _beside(source: Shape, index: Shape, dim: int) -> tuple[Dims, dict[str, int], dict[str, str]]:
    """The dimensions of an index tensor for one dimension, with sizes and `keep` of all factors.

    In other dimensions, the index is cut as the tensor if both have the same size.
    """
    sizes = {f"d{n}": size for n, size in enumerate(source)}
    sizes |= {f"x{n}": size for n, size in enumerate(index)}
    keep = {f"d{dim}": "is indexed by a tensor"}
    dims = []
    for n, size in enumerate(index):
        same = n != dim and size == source[n]
        dims.append((f"d{n}",) if same else (f"x{n}",))
        if not same and n != dim:
            keep[f"d{n}"] = keep[f"x{n}"] = "has an index of another length"
    return tuple(dims), sizes, keep


def _scatter(case: Case) -> Answer:
    source, index = case["self"].shape, case["index"].shape
    dim = dim_of(case["dim"], len(source))
    dims, sizes, keep = _beside(source, index, dim)
    keep[f"x{dim}"] = "says where values go"
    source_dims = tuple((f"d{n}",) for n in range(len(source)))
    values = case.arguments.get("src")
    operands: tuple[Dims, ...] = (source_dims, dims)
    if values is not None:
        operands = (*operands, dims if values.shape == index else _own(values, sizes, keep))
    adds = values is not None and case.target is not _ATEN.scatter_reduce.two
    linear = jointly(0, 2) if adds else ()
    return solve(case, Factors(operands, (source_dims,), sizes, linear, keep))


def _own(values: Operand, sizes: dict[str, int], keep: dict[str, str]) -> Dims:
    """Dimensions of a tensor that is larger than the index: the op takes a corner of it."""
    for n, size in enumerate(values.shape):
        sizes[f"v{n}"], keep[f"v{n}"] = size, "is longer than the index"
    return named(values.shape, "v")


def _index_select(case: Case) -> Answer:
    source = case["self"].shape
    dim = dim_of(case["dim"], len(source))
    dims = named(source)
    sizes = {f"d{n}": size for n, size in enumerate(source)} | {"i": case.shape()[dim]}
    result = (*dims[:dim], ("i",), *dims[dim + 1 :])
    keep = {f"d{dim}": "is indexed by a tensor"}
    factors = Factors((dims, (("i",),)), (result,), sizes, each(0), keep, moves=True)
    return solve(case, factors)


def _index_add(case: Case) -> Answer:
    source = case["self"].shape
    dim = dim_of(case["dim"], len(source))
    dims = named(source)
    sizes = {f"d{n}": size for n, size in enumerate(source)}
    sizes["i"] = case["source"].shape[dim]
    added_dims = (*dims[:dim], ("i",), *dims[dim + 1 :])
    keep = dict.fromkeys((f"d{dim}", "i"), "is indexed by a tensor")
    factors = Factors((dims, (("i",),), added_dims), (dims,), sizes, jointly(0, 2), keep)
    return solve(case, factors)


def _index_fill(case: Case) -> Answer:
    """Some entries along a dimension are replaced, by a number or by rows of a tensor."""
    source = case["self"].shape
    dim = dim_of(case["dim"], len(source))
    dims = named(source)
    sizes = {f"d{n}": size for n, size in enumerate(source)} | {"i": case["index"].shape[0]}
    keep = dict.fromkeys((f"d{dim}", "i"), "is indexed by a tensor")
    operand_dims = [dims, (("i",),)]
    linear: Linear = ()
    if "source" in case.arguments:
        operand_dims.append((*dims[:dim], ("i",), *dims[dim + 1 :]))
        linear = jointly(0, 2)
    elif isinstance(case["value"], Operand):
        operand_dims.append(())
    return solve(case, Factors(tuple(operand_dims), (dims,), sizes, linear, keep))


def _bucketize(case: Case) -> Answer:
    """The index of each entry among boundaries, which have to be whole."""
    dims = named(case.shape())
    sizes = {f"d{n}": size for n, size in enumerate(case.shape())}
    sizes["b"] = case["boundaries"].shape[0]
    keep = {"b": "is searched"}
    return solve(case, Factors((dims, (("b",),)), (dims,), sizes, (), keep))


RULES: Mapping[object, Rule] = {
    CHECKED_IDS: _checked_ids,
    _ATEN.embedding.default: _embedding,
    _ATEN.embedding_dense_backward.default: _embedding_backward,
    **dict.fromkeys((_ATEN.index.Tensor, _ATEN._unsafe_index.Tensor), _index),
    **dict.fromkeys((_ATEN.index_put.default, _ATEN._unsafe_index_put.default), _index_put),
    _ATEN.gather.default: _gather,
    **dict.fromkeys((_ATEN.scatter_add.default, _ATEN.scatter.src), _scatter),
    _ATEN.scatter.value: _scatter,
    _ATEN.index_select.default: _index_select,
    _ATEN.index_add.default: _index_add,
    **dict.fromkeys((_ATEN.index_fill.int_Scalar, _ATEN.index_fill.int_Tensor), _index_fill),
    _ATEN.index_copy.default: _index_fill,
    _ATEN.scatter_reduce.two: _scatter,
    _ATEN.bucketize.Tensor: _bucketize,
}
