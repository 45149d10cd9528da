"""Rules of ops that make a tensor from numbers: copies, or pieces if a user asks for a cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from .....ir.layout import Cut, Layout, shape_of
from ...autodiff.subgraphs import is_view, written_in_place
from ..cases import Answer, Case, Expansion, Local, LocalOp, Rule, whole
from ..cuts import canonical

_ATEN = torch.ops.aten


def made(case: Case, sizes: Mapping[str, int], local: Local | None = None) -> Answer:
    """The answer of an op that makes a tensor: the cuts that are asked for, or else copies.

    Args:
        case: the op; its operands, if any, only give the element type.
        sizes, local: as in `Answer`.
    """
    rank = len(case.shape())
    result = whole(rank)
    if case.asked is not None:
        pairs = zip(case.asked, case.shape(), strict=True)
        result = Layout(tuple(canonical(cut, size, case.sizes) for cut, size in pairs))
    operand_layouts = tuple(operand.layout for operand in case.operands)
    return Answer(operand_layouts, (result,), sizes, local, frozenset(range(rank)))


def counting(function: Callable[..., Any], cut: Cut) -> Expansion:
    """An expansion that uses `torch.arange` with this cut, so each rank makes its piece alone."""
    return Expansion(function, {_ATEN.arange.default: (cut,)})


def whole_then_piece(op: LocalOp) -> Any:
    """Make the whole tensor, and take the rank's piece of it."""
    region = op.results[0]
    assert region is not None
    return op.piece(op.run(), region)


def zeros(op: LocalOp, like: fx.Node) -> Any:
    """Zeros for the rank's pieces of all results, for ops whose kernels take no empty piece.

    Args:
        op: the op.
        like: a tensor on the device of the results.
    """
    pieces = tuple(
        None
        if region is None
        else op.emit(_ATEN.new_zeros.default, like, list(shape_of(region)), dtype=fake.dtype)
        for region, fake in zip(op.results, op.fakes, strict=True)
    )
    return pieces if len(pieces) > 1 else pieces[0]


def is_zeros(node: fx.Node) -> bool:
    """True if an op has made a value of zeros, and no op writes to it in place, or to a view."""
    return node.target in _ZEROS and not any(
        is_view(user) or written_in_place(user) is not None for user in node.users
    )


_ZEROS = frozenset({_ATEN.zeros.default, _ATEN.new_zeros.default, _ATEN.zeros_like.default})


def _like(case: Case) -> Answer:
    """The result is cut as the operand, whose values do not matter."""
    (operand,) = case.operands
    return Answer((operand.layout,), (Layout(operand.cuts),))


def _local_strided(op: LocalOp) -> Any:
    """A piece is contiguous: it needs no gaps between its rows."""
    (region,), (like,) = op.results, op.fakes
    assert region is not None
    return op.emit(
        _ATEN.empty.memory_format, list(shape_of(region)), dtype=like.dtype, device=like.device
    )


RULES: Mapping[object, Rule] = {
    **dict.fromkeys(
        (
            *(_ATEN.full.default, _ATEN.zeros.default, _ATEN.ones.default),
            *(_ATEN.empty.memory_format, _ATEN.new_zeros.default, _ATEN.new_ones.default),
            *(_ATEN.new_full.default, _ATEN.new_empty.default),
        ),
        partial(made, sizes={"size": 0}),
    ),
    **dict.fromkeys(
        (
            *(_ATEN.arange.default, _ATEN.arange.start, _ATEN.arange.start_step),
            *(_ATEN.scalar_tensor.default, _ATEN.eye.default, _ATEN.eye.m),
            _ATEN.linspace.default,
        ),
        partial(made, sizes={}, local=whole_then_piece),
    ),
    **dict.fromkeys(
        (_ATEN.empty_strided.default, _ATEN.new_empty_strided.default),
        partial(made, sizes={}, local=_local_strided),
    ),
    **dict.fromkeys(
        (
            *(_ATEN.zeros_like.default, _ATEN.ones_like.default, _ATEN.full_like.default),
            _ATEN.empty_like.default,
        ),
        _like,
    ),
}
