"""What the collectives compute, as functions of the whole group's tensors.

These are the definition that every communicator is held against. Tensors stand in group order,
and reductions run in that order, so results do not depend on who arrived first. Each function
returns fresh tensors, one for each rank of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...ir.attributes import ReduceOp

_COMBINE: dict[ReduceOp, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PROD: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
}


def reduce(tensors: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """Combine tensors of one dtype and shape elementwise, from the first to the last.

    The average of integers is cut towards zero. The sum of booleans is their disjunction.
    """
    combine = _COMBINE[op]
    total = tensors[0].clone(memory_format=torch.contiguous_format)
    for tensor in tensors[1:]:
        total = combine(total, tensor)
    if op is not ReduceOp.AVG:
        return total
    if total.is_floating_point() or total.is_complex():
        return total / len(tensors)
    return torch.div(total, len(tensors), rounding_mode="trunc")


def all_reduce(tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
    """Every rank gets the combination of all."""
    return _for_each(tensors, reduce(tensors, op))


def all_gather(tensors: Sequence[Tensor], dim: int) -> list[Tensor]:
    """Every rank gets all tensors, concatenated along `dim`."""
    return _for_each(tensors, torch.cat(list(tensors), dim))


def reduce_scatter(tensors: Sequence[Tensor], op: ReduceOp, dim: int) -> list[Tensor]:
    """Rank i gets the i-th equal part of the combination along `dim`."""
    return [part.clone() for part in split(reduce(tensors, op), len(tensors), dim)]


def all_to_all(tensors: Sequence[Tensor], dim: int) -> list[Tensor]:
    """Rank j gets the j-th equal part of every rank's tensor, concatenated along `dim`."""
    parts = [split(tensor, len(tensors), dim) for tensor in tensors]
    return [torch.cat([mine[j] for mine in parts], dim) for j in range(len(tensors))]


def split(tensor: Tensor, count: int, dim: int) -> list[Tensor]:
    """`count` equal parts of `tensor` along `dim`, as views.

    Raises:
        ValueError: the dimension is not a multiple of `count`.
    """
    length = tensor.shape[dim]
    if length % count:
        raise ValueError(
            f"dimension {dim} of length {length} cannot be cut into {count} equal parts"
        )
    part = length // count
    return [tensor.narrow(dim, index * part, part) for index in range(count)]


def _for_each(tensors: Sequence[Tensor], result: Tensor) -> list[Tensor]:
    return [result, *(result.clone() for _ in tensors[1:])]
