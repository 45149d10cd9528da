"""Small tensors that travel as one flat tensor, in which each rank packs its own pieces."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .layout import Cut, Layout
from .types import Place, TensorType

LARGE = 1 << 20
"""The least bytes of a rank's piece that travels by itself, which saves two copies of it."""


def piece_count(layout: Layout | None, place: Place) -> int:
    """The number of pieces that a layout cuts a tensor into."""
    cutting = () if layout is None else {axis for cut in layout.cuts for axis in cut.axes}
    return math.prod(size for axis, size in place.axes if axis in cutting)


def numel_at_rank(shape: tuple[int, ...], layout: Layout | None, place: Place) -> int:
    """The number of elements that a rank holds in a layout; the mean, where pieces are uneven."""
    return math.prod(shape) // piece_count(layout, place)


def packed(parts: Sequence[TensorType], place: Place, along: tuple[str, ...] = ()) -> TensorType:
    """The type of the flat tensor that packs tensors of one dtype, without a place.

    Args:
        parts: the types of the tensors, whose summands are along the same axes.
        place: the ranks.
        along: axes that become the minor ones of the cut, as those along which it is gathered.
    """
    used = {axis for p in parts if p.layout for cut in p.layout.cuts for axis in cut.axes}
    axes = tuple(axis for axis, _ in place.axes if axis in used and axis not in along)
    cut = Cut((*axes, *(axis for axis in along if axis in used)))
    summands = parts[0].layout.summands if parts[0].layout is not None else ()
    layout = Layout.of((cut,), summands)
    count = sum(numel_at_rank(part.shape, part.layout, place) for part in parts)
    return TensorType(parts[0].dtype, (count * piece_count(layout, place),), None, layout)
