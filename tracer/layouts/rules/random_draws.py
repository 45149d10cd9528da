"""Rules of ops that draw random numbers.

A rank draws those of the logical tensor, and keeps its piece, so a layout changes no number. All
ranks of a group must draw from the same state.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ....ir.layout import Layout
from ..cases import Answer, Case, LocalOp, Operand, Rule, whole
from .creation import made, whole_then_piece

_ATEN = torch.ops.aten


def _drawn(case: Case) -> Answer:
    # Not free: a second op would draw other numbers.
    return replace(made(case, {}), local=whole_then_piece, free=frozenset())


def _like(case: Case) -> Answer:
    """Cut as the tensor that it is made like, whose values do not matter."""
    (operand,) = case.operands
    return Answer((operand.layout,), (Layout(operand.cuts),), local=_local_like)


def _local_like(op: LocalOp) -> Any:
    (shape,), (region,) = op.shapes, op.results
    assert shape is not None
    assert region is not None
    lent = op.emit(_ATEN.new_empty.default, op.arguments["self"], list(shape))
    return op.piece(op.run(self=lent), region)


def _in_place(case: Case) -> Answer:
    """Numbers that are written to a tensor, or follow from its entries one by one."""
    first = case.operands[0]
    layout = Layout(first.cuts)
    others = tuple(whole(len(operand.shape)) for operand in case.operands[1:])
    return Answer((layout, *others), (layout,), local=_local_in_place)


def _local_in_place(op: LocalOp) -> Any:
    (shape,), (region,) = op.shapes, op.results
    assert shape is not None
    assert region is not None
    own = op.arguments["self"]
    drawn = op.run(self=op.emit(_ATEN.new_empty.default, own, list(shape)))
    return op.emit(_ATEN.copy_.default, own, op.piece(drawn, region))


def _dropout(case: Case) -> Answer:
    """A mask of the logical tensor's numbers, then a product."""
    operand = case["input"]
    assert isinstance(operand, Operand)
    layout = Layout(operand.cuts)
    return Answer((layout,), (layout, layout), local=_local_dropout)


def _local_dropout(op: LocalOp) -> Any:
    given, probability = op.arguments["input"], op.arguments["p"]
    shape, region = op.shapes[0], op.results[0]
    assert shape is not None
    assert region is not None
    if op.arguments["train"] is False or not probability:
        return op.run()
    ones = op.emit(_ATEN.new_ones.default, given, list(shape))
    drawn = op.emit(_ATEN.native_dropout.default, ones, probability, True)
    mask = op.piece(op.emit(operator.getitem, drawn, 1), region)
    scale = 0.0 if probability == 1 else 1 / (1 - probability)
    kept = op.emit(_ATEN.mul.Tensor, given, mask)
    return op.emit(_ATEN.mul.Scalar, kept, scale), mask


RULES: Mapping[object, Rule] = {
    **dict.fromkeys(
        (
            *(_ATEN.rand.default, _ATEN.randn.default, _ATEN.randint.default),
            *(_ATEN.randint.low, _ATEN.randperm.default),
        ),
        _drawn,
    ),
    **dict.fromkeys(
        (_ATEN.rand_like.default, _ATEN.randn_like.default, _ATEN.randint_like.default), _like
    ),
    **dict.fromkeys(
        (
            *(_ATEN.bernoulli_.float, _ATEN.uniform_.default, _ATEN.normal_.default),
            _ATEN.exponential_.default,
        ),
        _in_place,
    ),
    _ATEN.native_dropout.default: _dropout,
}
