"""Attention of a rank that has some rows of the queries, and all keys.

A row of causal attention sees the keys up to its own. So a run of rows sees all keys in front of it
without a mask, and its own ones with a causal mask: two calls of the kernel, and no mask in memory.
Their results are joined by the logarithms of their sums of exponentials, as blocks of keys are in
ring attention (https://arxiv.org/abs/2310.01889). The kernels of the backward take the statistics
of whole rows, so the gradients of blocks are those of the whole, and are added up.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ....ir.layout import Interval, shape_of
from .cases import LocalOp
from .values.accumulation import accumulation_type

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


@dataclass(frozen=True)
class _RowBlock:
    """Some rows of the queries, and some keys that they see.

    Attributes:
        rows: in indices of the rank's piece.
        keys: in indices of the whole sequence.
        is_causal: whether the first key is that of the first row, and rows see keys up to theirs.
    """

    rows: Interval
    keys: Interval
    is_causal: bool

    @property
    def length(self) -> int:
        """The number of rows."""
        return self.rows[1] - self.rows[0]


def forward_of_rows(op: LocalOp) -> Any:
    """The rank's rows of the result and of their statistics."""
    runs: list[list[fx.Node]] = []
    others: list[fx.Node] = []
    for group in _groups(op):
        parts = []
        for block in group:
            call = op.run(**_operands(op, block))
            others = others or [_item(op, call, i) for i in range(2, len(op.fakes))]
            statistics = _part(op, _item(op, call, 1), (0, block.length))
            parts.append([_item(op, call, 0), statistics])
        runs.append(_joined(op, parts))
    out, statistics = (_together(op, [run[i] for run in runs]) for i in range(2))
    if not op.fakes[1].shape[_ROWS]:  # nobody needs them
        statistics = _part(op, statistics, (0, 0))
    return (out, statistics, *others)


def backward_of_rows(op: LocalOp) -> Any:
    """The gradient of the rank's queries, and its summands of those of all keys and values."""
    count = _key_count(op)
    queries: list[fx.Node] = []
    totals: dict[int, fx.Node | None] = {}
    for group in _groups(op):
        own: fx.Node | None = None
        for block in group:
            call = op.run(**_operands(op, block), **_known(op, block))
            own = _sum(op, own, _item(op, call, 0))
            for index in range(1, len(op.fakes)):
                if not isinstance(op.fakes[index], torch.Tensor):  # its operand has no gradient
                    totals[index] = None
                    continue
                part = _item(op, call, index)
                part = _among_keys(op, part, block.keys, count) if index < 3 else part
                totals[index] = _sum(op, totals.get(index), part)
        assert own is not None
        queries.append(own)
    return (_together(op, queries), *totals.values())


def _groups(op: LocalOp) -> Iterator[list[_RowBlock]]:
    """For each run of the rank's rows, the blocks that its result is joined of."""
    count, at = _key_count(op), 0
    runs = op.operands[0][_ROWS]
    if not op.arguments["is_causal"]:
        yield [_RowBlock((0, shape_of(op.operands[0])[_ROWS]), (0, count), False)]
        return
    for start, stop in runs:
        rows = (at, at + stop - start)
        at = rows[1]
        blocks = [_RowBlock(rows, (0, min(start, count)), False)] if start else []
        if start < count:
            blocks.append(_RowBlock(rows, (start, min(stop, count)), True))
        yield blocks


def _key_count(op: LocalOp) -> int:
    count: int = op.arguments["key"].meta["val"].shape[_ROWS]
    return count


def _operands(op: LocalOp, block: _RowBlock) -> dict[str, Any]:
    """The arguments that name a block."""
    changed = {
        "query": _part(op, op.arguments["query"], block.rows),
        "key": _part(op, op.arguments["key"], block.keys),
        "value": _part(op, op.arguments["value"], block.keys),
        "is_causal": block.is_causal,
    }
    if "compute_log_sumexp" in op.arguments:
        changed["compute_log_sumexp"] = True
    return changed


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
    if rows == (0, node.meta["val"].shape[_ROWS]):
        return node
    return op.emit(_ATEN.slice.Tensor, node, _ROWS, *rows)


def _among_keys(op: LocalOp, part: fx.Node, keys: Interval, count: int) -> fx.Node:
    """The gradient of some keys, with zeros for all others."""
    if keys == (0, count):
        return part
    return op.emit(_ATEN.constant_pad_nd.default, part, [0, 0, keys[0], count - keys[1]])


def _together(op: LocalOp, runs: Sequence[fx.Node]) -> fx.Node:
    return runs[0] if len(runs) == 1 else op.emit(_ATEN.cat.default, list(runs), _ROWS)
