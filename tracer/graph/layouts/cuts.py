"""Cuts of dimensions that are products of factors: from a dimension to its factors, and back.

A view merges rows and tokens into one dimension, or splits a dimension into heads and their
entries. A cut of the product is a cut of one factor if each piece is made of whole indices of that
factor.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ....ir.layout import WHOLE, Cut, Intervals, Layout, Position, merge


@dataclass(frozen=True, slots=True)
class CutProduct(Cut):
    """The cut of a dimension with several factors that are cut, each by itself.

    Rows and heads, both cut and then viewed as one dimension, are such a product. No type has it:
    it lives between two views, and goes from part to part as its factors (`unmerged`).

    Attributes:
        parts: the sizes and cuts of the factors, the major one first.
    """

    parts: tuple[tuple[int, Cut], ...] = ()

    def piece(self, size: int, position: Position) -> Intervals:
        """The indices that the rank at `position` holds."""
        indices, below = [0], size
        for length, cut in self.parts:
            below //= length
            held = [i for start, stop in cut.piece(length, position) for i in range(start, stop)]
            indices = [index + below * i for index in indices for i in held]
        return merge((index, index + 1) for index in indices)


def unmerged(layout: Layout, shape: Sequence[int]) -> tuple[Layout, tuple[int, ...]]:
    """A layout and a shape with a dimension for each factor of a product.

    A rank's piece has the same numbers in the same order in both shapes: it is row-major over the
    pieces of the factors.
    """
    dims: list[tuple[int, Cut]] = []
    for size, cut in zip(shape, layout.cuts, strict=True):
        dims += cut.parts if isinstance(cut, CutProduct) else ((size, cut),)
    return replace(layout, cuts=tuple(cut for _, cut in dims)), tuple(size for size, _ in dims)


def is_packed(cut: Cut) -> bool:
    """True if the dimension consists of blocks, each of which is cut by itself."""
    return cut.blocks > 1 or isinstance(cut, CutProduct)


def factor_sizes(size: int, *cuts: Cut) -> tuple[int, ...]:
    """The sizes of the factors that one of some cuts of a dimension is a product of."""
    products = [cut for cut in cuts if isinstance(cut, CutProduct)]
    return tuple(length for length, _ in products[0].parts) if products else (size,)


def is_interval(cut: Cut) -> bool:
    """True if each piece is one run of indices."""
    return not is_packed(cut) and not cut.zigzag


def is_plain(cut: Cut) -> bool:
    """True if pieces are runs of indices, in the order of ranks."""
    return is_interval(cut) and not cut.shift


def count(cut: Cut, axes: Mapping[str, int]) -> int:
    """The number of pieces of a cut; `axes` has the sizes of the mesh's axes."""
    return math.prod(axes[axis] for axis in cut.axes)


def _chunks(cut: Cut, axes: Mapping[str, int]) -> int:
    """The number of chunks that pieces are made of: in zigzag order, a piece has two."""
    return count(cut, axes) * (2 if cut.zigzag else 1)


def refines(cut: Cut, coarser: Cut) -> bool:
    """True if a cut has the pieces of a coarser one, cut along further axes."""
    if isinstance(cut, CutProduct) or isinstance(coarser, CutProduct) or not coarser:
        return False
    return cut.axes[: len(coarser.axes)] == coarser.axes and coarser == replace(
        cut, axes=coarser.axes
    )


def canonical(cut: Cut, size: int, axes: Mapping[str, int]) -> Cut:
    """The same cut of a dimension of `size`, in a form in which equal cuts are equal."""
    if not cut or isinstance(cut, CutProduct):
        return cut
    units = size // cut.blocks // cut.unit
    return replace(cut, unit=1) if units % _chunks(cut, axes) == 0 else cut


def without(cut: Cut, size: int, axes: Collection[str], sizes: Mapping[str, int]) -> Cut:
    """The coarser cut of a dimension of `size` along the other axes.

    Args:
        cut: the cut.
        size: the size of the dimension.
        axes: those that no longer cut.
        sizes: the sizes of the mesh's axes.
    """
    parts = cut.parts if isinstance(cut, CutProduct) else _parts_by_axes(cut, size, axes, sizes)
    if parts:
        coarser = [without(part, length, axes, sizes) for length, part in parts]
        return join(coarser, [length for length, _ in parts], sizes)
    kept = tuple(axis for axis in cut.axes if axis not in axes)
    if len(kept) == len(cut.axes):
        return cut
    return replace(cut, axes=kept, shift=0) if kept else WHOLE


def _parts_by_axes(
    cut: Cut, size: int, axes: Collection[str], sizes: Mapping[str, int]
) -> tuple[tuple[int, Cut], ...]:
    """Two factors of a cut dimension, if minor axes stay: the major one has pieces of 1."""
    dropped = [number for number, axis in enumerate(cut.axes, 1) if axis in axes]
    if not dropped or dropped[-1] == len(cut.axes) or cut.zigzag or cut.shift:
        return ()
    first = Cut(cut.axes[: dropped[-1]], cut.blocks)
    major = count(first, sizes) * cut.blocks
    if not size or size % (major * cut.unit):
        return ()
    return ((major, first), (size // major, Cut(cut.axes[dropped[-1] :], 1, cut.unit)))


def without_axes(
    layout: Layout, shape: Sequence[int], axes: Collection[str], sizes: Mapping[str, int]
) -> Layout:
    """The coarser layout of a tensor of `shape` along the other axes; summands stay."""
    pairs = zip(layout.cuts, shape, strict=True)
    return replace(layout, cuts=tuple(without(cut, size, axes, sizes) for cut, size in pairs))


def spread(cut: Cut, sizes: Sequence[int], axes: Mapping[str, int]) -> tuple[Cut, ...] | None:
    """The cuts of the factors of a cut dimension, the major one first.

    Args:
        cut: the cut of the dimension.
        sizes: the sizes of its factors.
        axes: the sizes of the mesh's axes.

    Returns:
        A cut for each of `sizes`; None if cuts of the factors cannot give the same pieces.
    """
    if not cut:
        return (WHOLE,) * len(sizes)
    if len(sizes) == 1:
        return (cut,)
    if isinstance(cut, CutProduct):
        return _spread_product(cut, sizes, axes)
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
    if cut.unit == 1 and block % _chunks(cut, axes) == 0:
        return (replace(cut, unit=1), *rest)
    return None if cut.zigzag or cut.shift else _by_axes(cut, sizes, axes)


def _by_axes(cut: Cut, sizes: Sequence[int], axes: Mapping[str, int]) -> tuple[Cut, ...] | None:
    """The cuts if the first axes cut the major factor to pieces of 1, and the others the rest."""
    for number in range(1, len(cut.axes)):
        first = Cut(cut.axes[:number], cut.blocks)
        if count(first, axes) == sizes[0] // cut.blocks:
            inner = spread(Cut(cut.axes[number:], 1, cut.unit), sizes[1:], axes)
            return inner and (first, *inner)
    return None


def _spread_product(
    cut: CutProduct, sizes: Sequence[int], axes: Mapping[str, int]
) -> tuple[Cut, ...] | None:
    """The cuts of factors, by matching runs of the product's factors with runs of `sizes`."""
    parts, left, spread_cuts = list(cut.parts), list(sizes), list[Cut]()
    while left:
        run_sizes, run = [left.pop(0)], [parts.pop(0)] if parts else []
        while math.prod(run_sizes) != math.prod(size for size, _ in run):
            if math.prod(run_sizes) < math.prod(size for size, _ in run) and left:
                run_sizes.append(left.pop(0))
            elif parts:
                run.append(parts.pop(0))
            else:
                return None
        if len(run_sizes) == 1:
            spread_cuts.append(join([c for _, c in run], [size for size, _ in run], axes))
        elif len(run) == 1:
            inner = spread(run[0][1], run_sizes, axes)
            if inner is None:
                return None
            spread_cuts += inner
        else:
            return None
    return tuple(spread_cuts)


def join(cuts: Sequence[Cut], sizes: Sequence[int], axes: Mapping[str, int]) -> Cut:
    """The cut of a dimension whose factors have these cuts."""
    parts: list[tuple[int, Cut]] = []
    for cut, size in zip(cuts, sizes, strict=True):
        parts += cut.parts if isinstance(cut, CutProduct) else [(size, cut)]
    merged: list[tuple[int, Cut]] = []
    for size, cut in reversed(parts):
        merged.insert(0, (size, cut))
        while len(merged) > 1:
            (high, first), (low, second) = merged[:2]
            simple = _simple([first, second], [high, low], axes)
            if simple is None:
                break
            merged[:2] = [(high * low, simple)]
    if not merged:
        return WHOLE
    if len(merged) == 1:
        return canonical(merged[0][1], merged[0][0], axes)
    return CutProduct(tuple(axis for _, cut in merged for axis in cut.axes), parts=tuple(merged))


def _simple(cuts: Sequence[Cut], sizes: Sequence[int], axes: Mapping[str, int]) -> Cut | None:
    """The cut of a dimension whose factors have these cuts; None if it takes a `CutProduct`."""
    factors = [(cut, size) for cut, size in zip(cuts, sizes, strict=True) if size != 1 or cut]
    blocks = 1
    while factors and not factors[0][0]:
        blocks *= factors.pop(0)[1]
    if not factors:
        return WHOLE
    (cut, size), *rest = factors
    minor = math.prod(length for _, length in rest)
    inner = _simple([c for c, _ in rest], [length for _, length in rest], axes)
    if inner is None:
        return None
    whole = blocks * size * minor
    if not inner:
        joined = replace(cut, blocks=blocks * cut.blocks, unit=cut.unit * minor)
        return canonical(joined, whole, axes) if minor else None
    has_order = cut.zigzag or cut.shift or inner.shift
    if has_order or not is_interval(inner) or count(cut, axes) != size // cut.blocks:
        return None
    joined = Cut((*cut.axes, *inner.axes), blocks * cut.blocks, inner.unit)
    return canonical(joined, whole, axes)
