"""Attention of a rank that has some rows of the queries, and all keys or a block of them.

A row of causal attention sees the keys up to its own. So a run of rows sees all keys in front of it
without a mask, and its own ones with a causal mask: two calls of the kernel, and no mask in memory.
Their results are joined by the logarithms of their sums of exponentials, as blocks of keys are in
ring attention (https://arxiv.org/abs/2310.01889). The kernels of the backward take the statistics
of whole rows, so the gradients of blocks are those of the whole, and are added up.

Keys that no row sees are not computed with. Rows that see no key of a block have a result of zeros,
and the statistics of an empty sum, which are minus infinity.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from .....ir.layout import Interval, Intervals, Region, indices_at, length, shape_of
from ..cases import LocalOp
from ..values.accumulation import accumulation_type

_ATEN = torch.ops.aten
_ROWS = 2
"""The dimension of rows in queries, keys, values and statistics."""

PADDED = frozenset(
    {
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_efficient_attention_backward.default,
    }
)
"""Kernels whose statistics have a multiple of `PADDING` rows."""

PADDING = 32


_MASKS = ("attn_mask", "attn_bias")
_ALIGNMENT = 16
"""Kernels of GPUs take masks whose rows begin at multiples of so many entries."""


@dataclass(frozen=True)
class _RowBlock:
    """Some rows of the queries, and some keys that they see.

    Attributes:
        rows: in indices of the rank's rows.
        keys: in indices of the keys that the rank has.
        is_causal: whether the first key is that of the first row, and rows see keys up to theirs.
    """

    rows: Interval
    keys: Interval
    is_causal: bool

    @property
    def length(self) -> int:
        """The number of rows."""
        return self.rows[1] - self.rows[0]


@dataclass(frozen=True)
class _RunOfRows:
    """A run of the rank's rows, and the blocks of keys that it sees; none if it sees no key."""

    rows: Interval
    blocks: tuple[_RowBlock, ...]

    @property
    def length(self) -> int:
        """The number of rows."""
        return self.rows[1] - self.rows[0]


def forward_of_rows(op: LocalOp, is_part: bool = False) -> Any:
    """The rank's rows of the result and of their statistics.

    Args:
        op: attention.
        is_part: whether rows may see other keys than the rank has here, so that the results are
            joined with others: then rows that a mask keeps from all keys are marked as empty.
    """
    runs: list[list[fx.Node]] = []
    others: list[fx.Node | None] = []
    for run in _runs(op):
        parts = []
        for block in run.blocks:
            call = op.run(**_operands(op, block))
            others = others or [_item(op, call, i) for i in range(2, len(op.fakes))]
            statistics = _part(op, _item(op, call, 1), (0, block.length))
            if is_part:
                statistics = _marked(op, block, statistics)
            parts.append([_item(op, call, 0), statistics])
        runs.append(_joined(op, parts) if parts else _empty(op, run))
    out, statistics = (_together(op, [run[i] for run in runs]) for i in range(2))
    if not op.fakes[1].shape[_ROWS]:  # nobody needs them
        statistics = _part(op, statistics, (0, 0))
    return (out, statistics, *(others or [None] * (len(op.fakes) - 2)))


def backward_of_rows(op: LocalOp) -> Any:
    """The gradient of the rank's queries, and its summands of those of its keys and values."""
    count = length(_region_of(op, "key")[_ROWS])
    queries: list[fx.Node] = []
    totals: dict[int, fx.Node | None] = {}
    for run in _runs(op):
        own: fx.Node | None = None
        for block in run.blocks:
            call = op.run(**_operands(op, block), **_known(op, block))
            own = _sum(op, own, _item(op, call, 0))
            for index in range(1, len(op.fakes)):
                if not isinstance(op.fakes[index], torch.Tensor):  # its operand has no gradient
                    totals[index] = None
                    continue
                part = _item(op, call, index)
                part = _among_keys(op, part, block.keys, count) if index < 3 else part
                totals[index] = _sum(op, totals.get(index), part)
        queries.append(_zeros(op, 0, run.length) if own is None else own)
    names = ("query", "key", "value")
    return (
        _together(op, queries),
        *(totals.get(i) or _zeros_like(op, i, names) for i in range(1, len(op.fakes))),
    )


def at_once(op: LocalOp) -> Any:
    """The op in one call, of all rows and keys that the rank has."""
    return op.run(**_indices(op))


def _runs(op: LocalOp) -> Iterator[_RunOfRows]:
    """The runs of the rank's rows, in order, which its result is made of."""
    rows, keys = _region_of(op, "query")[_ROWS], _region_of(op, "key")[_ROWS]
    return _seen(rows, keys) if op.arguments["is_causal"] else _all_of(rows, keys)


def _all_of(rows: Intervals, keys: Intervals) -> Iterator[_RunOfRows]:
    all_rows, columns = (0, length(rows)), (0, length(keys))
    block = _RowBlock(all_rows, columns, False)
    yield _RunOfRows(all_rows, (block,) if columns[1] else ())


def _seen(rows: Intervals, keys: Intervals) -> Iterator[_RunOfRows]:
    """Runs of rows with the keys that causal attention lets them see.

    A row has the index of its key. The keys ahead of a run are the first ones of those that the
    rank has. Runs that see the same keys are one.
    """
    at, pending = 0, None
    for start, stop in rows:
        run_rows = (at, at := at + stop - start)
        ahead = sum(max(min(stop_key, start) - key, 0) for key, stop_key in keys)
        own = sum(max(min(key, stop) - max(first, start), 0) for first, key in keys)
        blocks = [_RowBlock(run_rows, (0, ahead), False)] if ahead else []
        if own:
            blocks.append(_RowBlock(run_rows, (ahead, ahead + own), True))
        run = _RunOfRows(run_rows, tuple(blocks))
        merged = None if own or pending is None else _merged(pending, run)
        if merged is None and pending is not None:
            yield pending
        pending = merged or run
    if pending is not None:
        yield pending


def _merged(first: _RunOfRows, second: _RunOfRows) -> _RunOfRows | None:
    """Two neighbouring runs as one; None if they see other keys, or by a causal mask."""
    if any(block.is_causal for block in first.blocks):
        return None
    if [block.keys for block in first.blocks] != [block.keys for block in second.blocks]:
        return None
    rows = (first.rows[0], second.rows[1])
    return _RunOfRows(rows, tuple(replace(block, rows=rows) for block in first.blocks))


def _region_of(op: LocalOp, name: str) -> Region:
    """The region of an operand that the rank holds."""
    tensors = [known for known, value in op.arguments.items() if isinstance(value, fx.Node)]
    return op.operands[tensors.index(name)]


def _operands(op: LocalOp, block: _RowBlock) -> dict[str, Any]:
    """The arguments that name a block."""
    changed = {
        "query": _part(op, op.arguments["query"], block.rows),
        "key": _part(op, op.arguments["key"], block.keys),
        "value": _part(op, op.arguments["value"], block.keys),
        "is_causal": block.is_causal,
    }
    for name in _MASKS:
        if isinstance(op.arguments.get(name), fx.Node):
            mask = _mask(op, name, block)
            is_part = op.target in PADDED and mask is not op.arguments[name]
            changed[name] = _aligned(op, mask) if is_part else mask
    if "compute_log_sumexp" in op.arguments:
        changed["compute_log_sumexp"] = True
    return changed | _indices(op, block)


def _indices(op: LocalOp, block: _RowBlock | None = None) -> dict[str, Any]:
    """The arguments that name the indices, of the whole, of a block, or of all that a rank has.

    Only attention with dropout has such arguments, by which it drops what one process would.
    """
    if "columns" not in op.arguments:
        return {}
    query, keys = _region_of(op, "query"), _region_of(op, "key")[_ROWS]
    rows = query[_ROWS]
    if block is not None:
        rows, keys = indices_at(rows, block.rows), indices_at(keys, block.keys)
    regions = {"batch": query[0], "heads": query[1], "rows": rows, "columns": keys}
    return {
        name: [bound for interval in intervals for bound in interval]
        for name, intervals in regions.items()
    }


def _mask(op: LocalOp, name: str, block: _RowBlock) -> fx.Node:
    """A mask's part for a block. Of a mask, a rank has the columns of all keys."""
    mask: fx.Node = op.arguments[name]
    shape = mask.meta["val"].shape
    if len(shape) > 1 and shape[-2] > 1:
        mask = _slice(op, mask, len(shape) - 2, block.rows)
    if shape[-1] == 1:
        return mask
    columns = indices_at(_region_of(op, "key")[_ROWS], block.keys)
    parts = [_slice(op, mask, len(shape) - 1, interval) for interval in columns]
    return op.emit(_ATEN.cat.default, parts, -1) if len(parts) > 1 else parts[0]


def _aligned(op: LocalOp, mask: fx.Node) -> fx.Node:
    """A copy of a mask whose rows begin where kernels of GPUs take them."""
    columns = mask.meta["val"].shape[-1]
    padded = op.emit(_ATEN.constant_pad_nd.default, mask, [0, _ALIGNMENT - columns % _ALIGNMENT])
    return op.emit(_ATEN.slice.Tensor, padded, padded.meta["val"].dim() - 1, 0, columns)


def _marked(op: LocalOp, block: _RowBlock, statistics: fx.Node) -> fx.Node:
    """Statistics in which rows that a mask keeps from all keys are those of an empty sum.

    Kernels give different statistics for such rows: zero on hosts.
    """
    for name in _MASKS:
        mask = op.arguments.get(name)
        if not isinstance(mask, fx.Node):
            continue
        part = _mask(op, name, block)
        if part.meta["val"].dtype is torch.bool:
            hides = op.emit(_ATEN.logical_not.default, part)
        else:
            hides = op.emit(_ATEN.eq.Scalar, part, -math.inf)
        empty = op.emit(_ATEN.all.dim, hides, -1, True)
        while empty.meta["val"].dim() < 4:
            empty = op.emit(_ATEN.unsqueeze.default, empty, 0)
        if statistics.meta["val"].dim() < 4:
            empty = op.emit(_ATEN.squeeze.dim, empty, -1)
        statistics = op.emit(_ATEN.masked_fill.Scalar, statistics, empty, -math.inf)
    return statistics


def _empty(op: LocalOp, run: _RunOfRows) -> list[fx.Node]:
    """The result and statistics of rows that see no key."""
    return [_zeros(op, 0, run.length), _zeros(op, 1, run.length, -math.inf)]


def _zeros(op: LocalOp, index: int, rows: int, value: float = 0.0) -> fx.Node:
    """Equal numbers, in the shape of some rows of a result."""
    region = op.results[index]
    assert region is not None
    sizes = [*shape_of(region)]
    sizes[_ROWS] = rows
    return _filled(op, index, sizes, value)


def _zeros_like(op: LocalOp, index: int, names: Sequence[str]) -> fx.Node | None:
    """Zeros for the gradient of an operand none of whose entries is seen."""
    if not isinstance(op.fakes[index], torch.Tensor):
        return None
    region = _region_of(op, names[index]) if index < len(names) else op.results[index]
    assert region is not None
    return _filled(op, index, [*shape_of(region)], 0.0)


def _filled(op: LocalOp, index: int, sizes: list[int], value: float) -> fx.Node:
    query, dtype = op.arguments["query"], op.fakes[index].dtype
    return op.emit(_ATEN.new_full.default, query, sizes, value, dtype=dtype)


def _known(op: LocalOp, block: _RowBlock) -> dict[str, Any]:
    """The arguments of a backward that belong to a block's rows, but for its operands."""
    names = ("grad_out", "grad_out_", "out", "logsumexp")
    changed: dict[str, Any] = {
        name: _part(op, op.arguments[name], block.rows) for name in names if name in op.arguments
    }
    if op.target in PADDED and block.length % PADDING:
        amount = -block.length % PADDING
        changed["logsumexp"] = op.emit(
            _ATEN.constant_pad_nd.default, changed["logsumexp"], [0, amount], float("inf")
        )
    if "max_q" in op.arguments:
        changed |= {"max_q": block.length, "max_k": block.keys[1] - block.keys[0]}
    return changed


def _joined(op: LocalOp, parts: Sequence[list[fx.Node]]) -> list[fx.Node]:
    """The result and statistics of rows, from those of blocks of their keys."""
    if len(parts) == 1:
        return parts[0]
    (first, of_first), (second, of_second) = parts
    total = op.emit(_ATEN.logaddexp.default, of_first, of_second)
    result: fx.Node | None = None
    for out, statistics in ((first, of_first), (second, of_second)):
        share = op.emit(_ATEN.exp.default, op.emit(_ATEN.sub.Tensor, statistics, total))
        if share.meta["val"].dim() < out.meta["val"].dim():
            share = op.emit(_ATEN.unsqueeze.default, share, -1)
        result = _sum(op, result, op.emit(_ATEN.mul.Tensor, _wide(op, out), share))
    assert result is not None
    return [result, total]


def _sum(op: LocalOp, total: fx.Node | None, part: fx.Node) -> fx.Node:
    if total is None:
        return part
    return op.emit(_ATEN.add.Tensor, _wide(op, total), _wide(op, part))


def _wide(op: LocalOp, node: fx.Node) -> fx.Node:
    """A value in the type in which parts are added up."""
    dtype = node.meta["val"].dtype
    wide = accumulation_type(dtype)
    return node if wide is dtype else op.emit(_ATEN._to_copy.default, node, dtype=wide)


def _item(op: LocalOp, call: fx.Node, index: int) -> fx.Node:
    return op.emit(operator.getitem, call, index)


def _part(op: LocalOp, node: fx.Node, rows: Interval) -> fx.Node:
    """Some rows of a tensor."""
    return _slice(op, node, _ROWS, rows)


def _slice(op: LocalOp, node: fx.Node, dim: int, indices: Interval) -> fx.Node:
    if indices == (0, node.meta["val"].shape[dim]):
        return node
    return op.emit(_ATEN.slice.Tensor, node, dim, *indices)


def _among_keys(op: LocalOp, part: fx.Node, keys: Interval, count: int) -> fx.Node:
    """The gradient of some keys, with zeros for all others."""
    if keys == (0, count):
        return part
    return op.emit(_ATEN.constant_pad_nd.default, part, [0, 0, keys[0], count - keys[1]])


def _together(op: LocalOp, runs: Sequence[fx.Node]) -> fx.Node:
    return runs[0] if len(runs) == 1 else op.emit(_ATEN.cat.default, list(runs), _ROWS)
