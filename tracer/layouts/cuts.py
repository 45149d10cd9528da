"""Cuts of dimensions that are products of factors: from a dimension to its factors, and back.

A view regards rows and tokens as one dimension, or a dimension as heads and what each has. A cut of
the product is a cut of one factor where its pieces are whole numbers of what lies below the factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...ir.layout import WHOLE, Cut


def count(cut: Cut, axes: Mapping[str, int]) -> int:
    """The number of pieces."""
    return math.prod(axes[axis] for axis in cut.axes)


def canonical(cut: Cut, size: int, axes: Mapping[str, int]) -> Cut:
    """The same cut of a dimension of `size`, in the one form in which cuts are compared."""
    if not cut:
        return WHOLE
    units = size // cut.blocks // cut.unit
    return replace(cut, unit=1) if units % count(cut, axes) == 0 else cut


def spread(cut: Cut, sizes: Sequence[int], axes: Mapping[str, int]) -> tuple[Cut, ...] | None:
    """The cuts of the factors of a cut dimension, the major one first.

    Returns:
        One for each of `sizes`; None if no factors have pieces that make those of the dimension.
    """
    if not cut:
        return (WHOLE,) * len(sizes)
    if len(sizes) == 1:
        return (cut,)
    if not sizes or 0 in sizes:
        return None
    if sizes[0] == 1:
        inner = spread(cut, sizes[1:], axes)
        return inner and (WHOLE, *inner)
    head, minor = sizes[0], math.prod(sizes[1:])
    if minor == 1:
        return (cut, *(WHOLE for _ in sizes[1:]))
    if cut.blocks % head == 0:
        inner = spread(replace(cut, blocks=cut.blocks // head), sizes[1:], axes)
        return inner and (WHOLE, *inner)
    if head % cut.blocks:
        return None
    rest = (WHOLE,) * (len(sizes) - 1)
    if cut.unit % minor == 0:
        return (canonical(replace(cut, unit=cut.unit // minor), head, axes), *rest)
    block = head // cut.blocks
    if cut.unit == 1 and block % count(cut, axes) == 0:
        return (replace(cut, unit=1), *rest)
    return _by_axes(cut, sizes, axes)


def _by_axes(cut: Cut, sizes: Sequence[int], axes: Mapping[str, int]) -> tuple[Cut, ...] | None:
    """The first axes cut the major factor to pieces of 1, the others the rest."""
    for number in range(1, len(cut.axes)):
        first = Cut(cut.axes[:number], cut.blocks)
        if count(first, axes) == sizes[0] // cut.blocks:
            inner = spread(Cut(cut.axes[number:], 1, cut.unit), sizes[1:], axes)
            return inner and (first, *inner)
    return None


def join(cuts: Sequence[Cut], sizes: Sequence[int], axes: Mapping[str, int]) -> Cut | None:
    """The cut of a dimension whose factors are cut so; None if there is none."""
    factors = [(cut, size) for cut, size in zip(cuts, sizes, strict=True) if size != 1 or cut]
    blocks = 1
    while factors and not factors[0][0]:
        blocks *= factors.pop(0)[1]
    if not factors:
        return WHOLE
    (cut, size), *rest = factors
    minor = math.prod(each for _, each in rest)
    inner = join([each for each, _ in rest], [each for _, each in rest], axes)
    if inner is None:
        return None
    whole = blocks * size * minor
    if not inner:
        joined = Cut(cut.axes, blocks * cut.blocks, cut.unit * minor)
        return canonical(joined, whole, axes) if minor else None
    if inner.blocks > 1 or count(cut, axes) != size // cut.blocks:
        return None
    joined = Cut((*cut.axes, *inner.axes), blocks * cut.blocks, inner.unit)
    return canonical(joined, whole, axes)
