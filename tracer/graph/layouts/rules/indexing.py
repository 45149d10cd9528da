"""Rules of ops that take entries by tensors of indices: gather, index, scatter.

Where the dimension is cut along which they take entries, each rank reads or writes its own
(`rows`). Where the indices are cut that say to which entries numbers are added, ranks have summands
of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from .....ir.layout import shape_of
from ..cases import Answer, Case, Expansion, LocalOp, Operand, Rule, Shape, dim_of
from ..cuts import is_packed
from ..factors import Dim, Dims, Factor, Factors, Linear, each, jointly
from ..functional import other_form
from ..solution import solve
from .creation import is_zeros
from .rows import Selection, partial_selections, taken, written
from .views import named

_ATEN = torch.ops.aten


@dataclass(frozen=True)
class _Indexed:
    """The dimensions of an op that indexes some dimensions of a tensor.

    Attributes:
        source: the dimensions of the tensor.
        result: the dimensions of the indexed entries.
        indices: the dimensions of each index tensor.
        counts: index tensors, by number, that are `arange` of a dimension. On a rank, they become
            `arange` of the piece.
        selections: all other index tensors.
        trailing: the number of dimensions of the result behind those of the index tensors.
        sizes, keep: as in `Factors`.
    """

    source: Dims
    result: Dims
    indices: tuple[Dims, ...]
    counts: frozenset[int]
    selections: tuple[Selection, ...]
    trailing: int
    sizes: dict[str, int]
    keep: dict[str, str]


def _indexed(case: Case) -> _Indexed:
    shape = case["self"].shape
    index_tensors = _numbered(case["indices"])
    common = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        *(index.shape for _, index in index_tensors)
    )
    index_dims: Dims = tuple((f"i{n}",) for n in range(len(common)))
    source: list[Dim] = list(named(shape))
    sizes = {f"d{n}": size for n, size in enumerate(shape)}
    sizes |= {f"i{n}": size for n, size in enumerate(common)}
    keep: dict[str, str] = {}
    counts, selections = set(), list[Selection]()
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
            selections.append(Selection(k, place, 1 + place, wraps=True))
            keep |= _packed(case, k)
    places = [k for k, _ in index_tensors]
    rest = [dim for k, dim in enumerate(source) if k not in places]
    ahead = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    result = (*rest[:ahead], *index_dims, *rest[ahead:])
    indices = tuple(_aligned(index.shape, common) for _, index in index_tensors)
    return _Indexed(
        *(tuple(source), result, indices, frozenset(counts), tuple(selections)),
        *(len(rest) - ahead, sizes, keep),
    )


def _packed(case: Case, dim: int) -> dict[str, str]:
    """`keep` of a dimension along which entries are selected: pieces of it are one run, or two."""
    source = case["self"]
    packed = bool(source.shape) and is_packed(source.cuts[dim])
    return {f"d{dim}": "is packed"} if packed else {}


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


def _index(case: Case) -> Answer | Expansion:
    indexed = _indexed(case)
    if _sums_bools(case, [selection.dim for selection in indexed.selections]):
        return Expansion(partial(_as_numbers, case.target))
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
    return solve(case, factors, local=partial(_local_index, indexed, case["self"].shape))


def _sums_bools(case: Case, dims: Sequence[int]) -> bool:
    """True if ranks would add up their own entries of a tensor of bools."""
    source = case["self"]
    return source.dtype is torch.bool and bool(source.shape) and case.has_cut(source, *dims)


def _as_numbers(op: torch._ops.OpOverload, *, self: torch.Tensor, **arguments: Any) -> Any:
    return op(self.to(torch.uint8), **arguments)


def _index_put(case: Case) -> Answer | Expansion:
    if _fills_by_mask(case):
        return Expansion(_filled)
    indexed = _indexed(case)
    values = case["values"].shape
    result = [indexed.sizes[dim[0]] for dim in indexed.result]
    first = len(result) - len(values)
    value_dims = tuple(
        indexed.result[first + n] if size == result[first + n] else ()
        for n, size in enumerate(values)
    )
    dims = {dim for dims in indexed.indices for dim in dims if dim and dim not in indexed.source}
    factors = Factors(
        (indexed.source, *indexed.indices, value_dims),
        (indexed.source,),
        indexed.sizes,
        jointly(0, len(indexed.indices) + 1),
        indexed.keep,
        passive=frozenset(1 + n for n in indexed.counts),
    )
    local = partial(_local_index, indexed, case["self"].shape)
    return _placed(case, _Placing(factors, [dim[0] for dim in dims], case["accumulate"]), local)


def _fills_by_mask(case: Case) -> bool:
    """True if a mask says where the same values are written, as in `x[mask] = 0`."""
    (ahead, mask), *others = _numbered(case["indices"])
    if others or mask.dtype is not torch.bool:
        return False
    values = case["values"].shape
    behind = len(case["self"].shape) - ahead - len(mask.shape)
    return all(size == 1 for size in values[: max(len(values) - behind, 0)])


def _numbered(indices: Sequence[Any]) -> list[tuple[int, Any]]:
    """The index tensors, with their places among the indices."""
    return [(k, index) for k, index in enumerate(indices) if index is not None]


def _filled(
    *, self: torch.Tensor, indices: list[Any], values: torch.Tensor, accumulate: bool, **_: Any
) -> torch.Tensor:
    ((ahead, mask),) = _numbered(indices)
    behind = self.dim() - ahead - mask.dim()
    mask = mask.view(*[1] * ahead, *mask.shape, *[1] * behind)
    values = values.view(values.shape[max(values.dim() - behind, 0) :])
    return torch.where(mask, self + values if accumulate else values, self)


def _local_index(indexed: _Indexed, shape: Shape, op: LocalOp) -> Any:
    """Run the op; indices that are `arange` of a dimension become `arange` of its piece."""
    indices = list(op.arguments["indices"])
    places = [k for k, index in enumerate(indices) if index is not None]
    for place, k in enumerate(places):
        if place in indexed.counts:
            indices[k] = _counted(op, indices[k], shape_of(op.operands[0])[k])

    def run(chosen: Mapping[int, fx.Node], source: Any) -> fx.Node:
        numbers = dict(zip(places, chosen.values(), strict=True))
        return op.run(self=source, indices=[numbers.get(k) for k in range(len(indices))])

    numbered = {place: indices[k] for place, k in enumerate(places)}
    return _selected(op, _Local(indexed.selections, numbered, shape, indexed.trailing), run)


def _counted(op: LocalOp, index: fx.Node, size: int) -> fx.Node:
    like = index.meta["val"]
    numbers = op.emit(_ATEN.arange.default, size, dtype=like.dtype, device=like.device)
    return op.emit(_ATEN.view.default, numbers, [size if n != 1 else 1 for n in like.shape])


@dataclass(frozen=True)
class _Local:
    """The arguments of `taken` and `written`, for all selections of an op."""

    selections: Sequence[Selection]
    indices: Mapping[int, fx.Node]
    shape: Shape
    trailing: int = 0


def _selected(op: LocalOp, local: _Local, run: Any) -> Any:
    """The op on a rank, which may have a part of the dimension along which it selects entries."""
    selections = partial_selections(op, local.selections, local.shape)
    if not selections:
        return run(local.indices, op.arguments["self"])
    if op.target in _READS:
        return taken(op, selections, local.indices, local.shape, local.trailing, run)
    return written(op, selections, local.indices, local.shape, run)


def _along(case: Case) -> Callable[[LocalOp], Any]:
    """The op on a rank, for ops that take one tensor of indices and a dimension."""
    shape = case["self"].shape
    dim = dim_of(case["dim"], len(shape))
    selections = (Selection(dim, 0, 1),) if shape else ()
    trailing = 0 if case.target is _ATEN.gather.default else len(shape) - dim - 1

    def local(op: LocalOp) -> Any:
        known = _Local(selections, {0: op.arguments["index"]}, shape, trailing)
        return _selected(op, known, lambda chosen, at: op.run(self=at, index=chosen[0]))

    return local


@dataclass(frozen=True)
class _Placing:
    """An op that writes values where indices say.

    Attributes:
        factors: its dimensions; the op is linear in the tensor and the values jointly.
        placed: the factors of the values whose place indices say.
        adds: whether the values are added up.
    """

    factors: Factors
    placed: Sequence[Factor]
    adds: bool


def _placed(case: Case, placing: _Placing, local: Callable[[LocalOp], Any]) -> Answer | Expansion:
    """Where values are cut, ranks have summands: of zeros that they are added to."""
    factors, source = placing.factors, case["self"]
    if placing.adds and source.dtype is not torch.bool:
        if is_zeros(source.node):
            values = len(factors.operands) - 1
            return solve(case, replace(factors, linear=each(values)), local=local)
        if any(map(_cuts_one_of(placing.placed), factors.operands, case.operands)):
            return Expansion(partial(_added, case.target))
    keep = dict(factors.keep) | dict.fromkeys(placing.placed, "says where values go")
    return solve(case, replace(factors, keep=keep), local=local)


def _cuts_one_of(placed: Sequence[Factor]) -> Callable[[Dims, Operand], bool]:
    def cuts(dims: Dims, operand: Operand) -> bool:
        pairs = zip(dims, operand.cuts, strict=True)
        return any(cut and factor in placed for dim, cut in pairs for factor in dim)

    return cuts


def _added(op: torch._ops.OpOverload, *, self: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Values that are added to a tensor, by way of their sum."""
    total = (other_form(op) or op)(torch.zeros_like(self), **arguments)
    return self.add_(total) if op._schema.is_mutable else self + total


def _gather(case: Case) -> Answer | Expansion:
    source, index = case["self"].shape, case["index"].shape
    dim = dim_of(case["dim"], len(source))
    if _sums_bools(case, [dim]):
        return Expansion(partial(_as_numbers, case.target))
    dims, sizes, keep = _beside(source, index, dim)
    keep |= _packed(case, dim)
    source_dims = named(source)
    factors = Factors((source_dims, dims), (dims,), sizes, each(0), keep, moves=True)
    return solve(case, factors, local=_along(case))


def _beside(source: Shape, index: Shape, dim: int) -> tuple[Dims, dict[str, int], dict[str, str]]:
    """The dimensions of an index tensor for one dimension, with sizes and `keep` of all factors.

    In other dimensions, the index is cut as the tensor if both have the same size.
    """
    sizes = {f"d{n}": size for n, size in enumerate(source)}
    sizes |= {f"x{n}": size for n, size in enumerate(index)}
    keep: dict[str, str] = {}
    dims = []
    for n, size in enumerate(index):
        same = n != dim and size == source[n]
        dims.append((f"d{n}",) if same else (f"x{n}",))
        if not same and n != dim:
            keep[f"d{n}"] = keep[f"x{n}"] = "has an index of another length"
    return tuple(dims), sizes, keep


def _scatter(case: Case) -> Answer | Expansion:
    source, index = case["self"].shape, case["index"].shape
    dim = dim_of(case["dim"], len(source))
    dims, sizes, keep = _beside(source, index, dim)
    keep |= _packed(case, dim)
    values = case.arguments.get("src")
    operands: tuple[Dims, ...] = (named(source), dims)
    if values is not None:
        operands = (*operands, dims if values.shape == index else _own(values, sizes, keep))
    op = other_form(case.target) or case.target
    linear = jointly(0, 2) if values is not None and op is not _ATEN.scatter_reduce.two else ()
    factors = Factors(operands, (named(source),), sizes, linear, keep)
    # A piece of the index goes with one of the values only if they have equal shapes.
    adds = op is _ATEN.scatter_add.default and case["src"].shape == index
    return _placed(case, _Placing(factors, [f"x{dim}"], adds), _along(case))


def _own(values: Operand, sizes: dict[str, int], keep: dict[str, str]) -> Dims:
    """Dimensions of a tensor that is larger than the index: the op takes a corner of it."""
    for n, size in enumerate(values.shape):
        sizes[f"v{n}"], keep[f"v{n}"] = size, "is longer than the index"
    return named(values.shape, "v")


def _index_select(case: Case) -> Answer | Expansion:
    source = case["self"].shape
    dim = dim_of(case["dim"], len(source))
    if _sums_bools(case, [dim]):
        return Expansion(partial(_as_numbers, case.target))
    dims = named(source)
    sizes = {f"d{n}": size for n, size in enumerate(source)} | {"i": case["index"].shape[0]}
    result = (*dims[:dim], ("i",), *dims[dim + 1 :])
    keep = _packed(case, dim)
    factors = Factors((dims, (("i",),)), (result,), sizes, each(0), keep, moves=True)
    return solve(case, factors, local=_along(case))


def _index_add(case: Case) -> Answer | Expansion:
    dims, added_dims, sizes = _rows(case)
    keep = _packed(case, dim_of(case["dim"], len(dims)))
    operands = (dims, (("i",),), added_dims)
    factors = Factors(operands, (dims,), sizes, jointly(0, 2), keep)
    return _placed(case, _Placing(factors, ["i"], adds=True), _along(case))


def _rows(case: Case) -> tuple[Dims, Dims, dict[str, int]]:
    """The dimensions of a tensor and of the rows that are written to it; sizes of factors."""
    source = case["self"].shape
    dim, dims = dim_of(case["dim"], len(source)), named(source)
    sizes = {f"d{n}": size for n, size in enumerate(source)}
    return dims, (*dims[:dim], ("i",), *dims[dim + 1 :]), sizes | {"i": case["index"].shape[0]}


def _index_fill(case: Case) -> Answer | Expansion:
    """Some entries along a dimension are replaced, by a number or by rows of a tensor."""
    dims, row_dims, sizes = _rows(case)
    operand_dims = [dims, (("i",),)]
    linear: Linear = ()
    if "source" in case.arguments:
        operand_dims.append(row_dims)
        linear = jointly(0, 2)
    elif isinstance(case["value"], Operand):
        operand_dims.append(())
    keep = _packed(case, dim_of(case["dim"], len(dims)))
    factors = Factors(tuple(operand_dims), (dims,), sizes, linear, keep)
    return _placed(case, _Placing(factors, ["i"], adds=False), _along(case))


def _bucketize(case: Case) -> Answer:
    """The index of each entry among boundaries, which have to be whole."""
    dims = named(case.shape())
    sizes = {f"d{n}": size for n, size in enumerate(case.shape())}
    sizes["b"] = case["boundaries"].shape[0]
    keep = {"b": "is searched"}
    return solve(case, Factors((dims, (("b",),)), (dims,), sizes, (), keep))


_READS = frozenset(
    {
        *(_ATEN.index.Tensor, _ATEN._unsafe_index.Tensor, _ATEN.gather.default),
        _ATEN.index_select.default,
    }
)
"""The ops that read entries; the others write to them."""

RULES: Mapping[object, Rule] = {
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
