"""Lay an op out by factors: its dimensions are written as products of letters, as in einsum.

A dimension of an operand or a result is a product of factors. A factor that is cut in one operand
is cut alike in all operands and results that have it. A factor that a result lacks is contracted:
where it is cut, ranks get summands. Shardy's op sharding rules and einops do the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ....ir.attributes import ReduceOp
from .cases import Shape

Factor: TypeAlias = str
Dim: TypeAlias = tuple[Factor, ...]
Dims: TypeAlias = tuple[Dim, ...]

Linear: TypeAlias = tuple[frozenset[int], ...]
"""Sets of operands. The op is linear in each set jointly, while all other operands are fixed."""

NOT_LINEAR: Linear = ()


@dataclass(frozen=True)
class Factors:
    """The dimensions of an op's operands and results as factors.

    Attributes:
        operands: the dimensions of each operand; `()` is a dimension of 1 that is broadcast.
        results: the dimensions of each result; None for a result that is no tensor.
        sizes: the size of each factor.
        linear: the operands whose summands give summands of the result.
        keep: factors that must be whole, with the reason.
        reduce: the reduction of a contracted factor's summands; None if the factor must be whole.
        moves: whether the op only moves entries, so that summands of any kind go through.
        passive: operands that the op takes in any layout, and that cut no factor.
        zeros: sets of operands; where all of a set are zero, the result is, as for a linear op.
        choice: the factor of experts, and the operand that has the number of each row's expert.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims | None, ...]
    sizes: Mapping[Factor, int]
    linear: Linear = NOT_LINEAR
    keep: Mapping[Factor, str] = field(default_factory=dict)
    reduce: ReduceOp | None = ReduceOp.SUM
    moves: bool = False
    passive: frozenset[int] = frozenset()
    zeros: Linear = NOT_LINEAR
    choice: tuple[Factor, int] | None = None


def each(*operands: int) -> Linear:
    """The op is linear in each of these operands by itself."""
    return tuple(frozenset({operand}) for operand in operands)


def jointly(*operands: int) -> Linear:
    """The op is linear in these operands together, as a sum is."""
    return (frozenset(operands),)


def letters(text: str) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
    """Read dimensions of one factor each, as in `mk,kn->mn`."""
    operand_words, _, result_words = text.partition("->")
    read = [
        tuple(tuple((letter,) for letter in word) for word in side.split(","))
        for side in (operand_words, result_words)
    ]
    return read[0], read[1]


def sizes_of(operands: Sequence[Dims], shapes: Iterable[Shape]) -> dict[Factor, int]:
    """The sizes of factors that stand for a whole dimension."""
    return {
        dim[0]: size
        for dims, shape in zip(operands, shapes, strict=True)
        for dim, size in zip(dims, shape, strict=True)
        if len(dim) == 1
    }
