"""Compute the outcome of a collective from its declared exchange and the group's tensors.

This is the definition that every communicator is held against. Tensors stand in group order, and
reductions run in that order, so results do not depend on which rank arrived first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ir.attributes import ReduceOp
from ..ir.layout import Region
from ..ir.ops import Exchange, RoutedRows

_COMBINE: dict[ReduceOp, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PROD: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
}


def reduce(tensors: Sequence[Tensor], op: ReduceOp, donated: int | None = None) -> Tensor:
    """Combine tensors of one dtype and shape elementwise, from the first to the last.

    The average of integers is cut towards zero. The sum of booleans is their disjunction.

    Args:
        donated: the index of a contiguous tensor in whose memory the result may lie.
    """
    total, *others = tensors
    for index, tensor in enumerate(others, start=1):
        # The donated memory is written only when its own numbers are in the total.
        into = None if donated is None or donated > index else tensors[donated]
        total = _COMBINE[op](total, tensor, out=into)
    if others:  # then the total has memory of its own, and needs no copy
        total = total.contiguous()
    else:
        total = total.clone(memory_format=torch.contiguous_format)
    if op is not ReduceOp.AVG:
        return total
    if total.is_floating_point() or total.is_complex():
        return total / len(tensors)
    return torch.div(total, len(tensors), rounding_mode="trunc")


def cut(exchange: Exchange, value: Any, member: int) -> Any:
    """The piece of an operand that a member gets, as a view: all of it, or the member's part."""
    if exchange.cut is None:
        return value
    part = _part(value, len(exchange.members), exchange.cut)
    return value.narrow(exchange.cut, member * part, part)


def combine(exchange: Exchange, pieces: Sequence[Any], donated: int | None = None) -> Any:
    """The value that a receiver makes from its pieces, one of each sender; a tensor is a new one.

    Args:
        donated: the index of the piece in whose memory a reduction may leave its result, or None.
    """
    if exchange.reduce is not None:
        return reduce(pieces, exchange.reduce, donated)
    if exchange.concat is not None:
        return torch.cat(list(pieces), exchange.concat)
    (piece,) = pieces
    return piece.clone() if isinstance(piece, Tensor) else piece


def own_rows(routed: RoutedRows, shape: Sequence[int], ids: Tensor) -> list[Tensor]:
    """For each member, a mask of the rows of a whole tensor that are of its experts.

    Args:
        routed: the experts of each member.
        shape: the shape of the tensor.
        ids: `[rows, choices]`; the tensor has a row for each row, or for each id.

    Returns:
        Booleans, one for each row of the tensor in the order of its leading dimensions.
    """
    by_row = ids.reshape(math.prod(shape[: routed.lead]), -1)
    masks: dict[Region, Tensor] = {}
    for region in routed.experts:
        if region not in masks:
            parts = [(by_row >= first) & (by_row < last) for first, last in region[0]]
            parts = parts or [torch.zeros_like(by_row, dtype=torch.bool)]
            masks[region] = functools.reduce(torch.logical_or, parts).any(1)
    return [masks[region] for region in routed.experts]


def _only(rows: Tensor, tensor: Tensor, lead: int) -> Tensor:
    """The tensor with zeros for all rows but these."""
    mask = rows.view(*tensor.shape[:lead], *(1,) * (tensor.dim() - lead))
    return torch.where(mask, tensor, 0)


def _outcomes_of_rows(
    exchange: Exchange, operands: Sequence[tuple[Tensor, Tensor]]
) -> list[Tensor]:
    """The same of a collective in which ids say which rows travel."""
    routed, (_, ids) = exchange.routed, operands[0]
    assert routed is not None, "only some rows travel"
    tensors = [tensor for tensor, _ in operands]
    if exchange.concat is not None:
        whole = torch.cat(tensors)
        return [_only(rows, whole, routed.lead) for rows in own_rows(routed, whole.shape, ids)]
    masks = own_rows(routed, tensors[0].shape, ids)
    tensors = [_only(m, tensor, routed.lead) for m, tensor in zip(masks, tensors, strict=True)]
    return [
        combine(exchange, [cut(exchange, tensor, member) for tensor in tensors])
        for member in range(len(tensors))
    ]


def outcomes(exchange: Exchange, operands: Sequence[Any]) -> list[Any]:
    """The value of each member, in group order, from the senders' tensors; None for a unit.

    Where ids say which rows travel, a sender gives a pair of its tensor and the ids.
    """
    if not exchange.receivers:
        return [None for _ in exchange.members]
    if exchange.routed is not None:
        return [*_outcomes_of_rows(exchange, operands)]
    if exchange.is_shared:
        whole = combine(exchange, operands)
        return [whole, *(whole.clone() for _ in exchange.members[1:])]
    return [
        combine(exchange, [cut(exchange, operand, member) for operand in operands])
        if rank in exchange.receivers
        else None
        for member, rank in enumerate(exchange.members)
    ]


def split(tensor: Tensor, count: int, dim: int) -> list[Tensor]:
    """`count` equal parts of `tensor` along `dim`, as views.

    Raises:
        ValueError: the dimension is not a multiple of `count`.
    """
    part = _part(tensor, count, dim)
    return [tensor.narrow(dim, index * part, part) for index in range(count)]


def _part(tensor: Tensor, count: int, dim: int) -> int:
    """The length of one of `count` equal parts.

    Raises:
        ValueError: the dimension is not a multiple of `count`.
    """
    length = tensor.shape[dim]
    if length % count:
        raise ValueError(
            f"dimension {dim} of length {length} cannot be cut into {count} equal parts"
        )
    return length // count
