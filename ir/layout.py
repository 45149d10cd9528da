"""Layouts: the part of a logical tensor that each rank of a group holds.

A dimension may be cut along axes of a mesh, the major axis first. Ranks that differ only along axes
that cut nothing hold copies of the same part. The ranks along an axis may also hold summands: the
logical tensor is then their sum.

Piece k of P, of a dimension of n entries, is [kn // P, (k+1)n // P). So P need not divide n, pieces
may be empty, and gathering along the minor axis of a cut gives the pieces of the coarser cut.

Parts are regions: for each dimension, intervals of the logical index. A dimension has one interval,
unless it is packed (`Cut.blocks`) or in zigzag order (`Cut.zigzag`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from .attributes import ReduceOp

Interval: TypeAlias = tuple[int, int]
"""The first index, and the index behind the last."""

Intervals: TypeAlias = tuple[Interval, ...]
"""Indices of one dimension, as ascending intervals that are neither empty nor adjacent."""

Region: TypeAlias = tuple[Intervals, ...]
"""A part of a logical tensor: the product of the indices of each dimension."""

Position: TypeAlias = Mapping[str, tuple[int, int]]
"""The coordinate of a rank along each axis of its mesh, and the size of the axis."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The way in which one dimension is cut.

    Attributes:
        axes: the axes that cut it, the major one first; empty if it is whole.
        blocks: the number of blocks of equal size that the dimension consists of. Each block is
            cut by itself, as in a packed projection of queries, keys and values.
        unit: pieces begin at multiples of this number of indices: 2 rows of 7 tokens, viewed as
            one dimension of 14, are cut between the rows. It divides the size of a block.
        zigzag: each of P ranks has two of 2P chunks, k and 2P - 1 - k: one from each end. So ranks
            do equal work where rows depend on all rows ahead of them, as in causal attention.
        shift: each rank has the piece that belongs to the rank so many positions ahead of it, and
            the first ranks have those of the last: a block on its way around a ring. It is less
            than the number of pieces.
    """

    axes: tuple[str, ...] = ()
    blocks: int = 1
    unit: int = 1
    zigzag: bool = False
    shift: int = 0

    def __bool__(self) -> bool:
        """True if the dimension is cut."""
        return bool(self.axes)

    def piece(self, size: int, position: Position) -> Intervals:
        """The indices of a dimension of `size` that the rank at `position` holds."""
        index, count = 0, 1
        for axis in self.axes:
            coordinate, length = position[axis]
            index, count = index * length + coordinate, count * length
        block = size // self.blocks
        units = block // self.unit
        chunks, count = self._chunks((index - self.shift) % count, count)
        runs = [
            tuple([at * units // count * self.unit for at in (chunk, chunk + 1)])
            for chunk in chunks
        ]
        return merge(
            (at + start, at + stop) for at in range(0, size, max(block, 1)) for start, stop in runs
        )

    def _chunks(self, index: int, count: int) -> tuple[tuple[int, ...], int]:
        """The numbers of the chunks that are a piece, and the number of all chunks."""
        if self.zigzag:
            return (index, 2 * count - 1 - index), 2 * count
        return (index,), count

    def __str__(self) -> str:
        return ".".join(self.axes)

    @property
    def text(self) -> str:
        """The axes, `~` for zigzag order, and the shift: `cp`, `cp~` or `cp~+1`."""
        shift = f"+{self.shift}" if self.shift else ""
        return f"{self}{'~' if self.zigzag else ''}{shift}"


WHOLE = Cut()


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a tensor over the axes of a mesh; the tensor's type has the mesh as its place.

    Attributes:
        cuts: one for each dimension.
        summands: the axes along which ranks hold summands, in the mesh's order.
        reduce: the operation that combines the summands.
    """

    cuts: tuple[Cut, ...]
    summands: tuple[str, ...] = ()
    reduce: ReduceOp = field(default=ReduceOp.SUM)

    @staticmethod
    def of(
        cuts: Iterable[Cut], summands: tuple[str, ...] = (), reduce: ReduceOp = ReduceOp.SUM
    ) -> Layout | None:
        """The layout, or None if every rank holds a copy of the whole tensor."""
        layout = Layout(tuple(cuts), summands, reduce)
        return layout if layout.axes else None

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that it uses: those of the cuts, then those of summands."""
        return (*(axis for cut in self.cuts for axis in cut.axes), *self.summands)

    def keeping(self, summands: Iterable[str]) -> Layout:
        """The layout with the same cuts, and with summands along these axes only."""
        chosen_axes = set(summands)
        axes = tuple(axis for axis in self.summands if axis in chosen_axes)
        return Layout(self.cuts, axes, self.reduce) if axes else Layout(self.cuts)

    def region(self, shape: tuple[int, ...], position: Position) -> Region:
        """The part of a tensor of `shape` that the rank at `position` has a copy or summand of."""
        return tuple(cut.piece(size, position) for cut, size in zip(self.cuts, shape, strict=True))


def merge(intervals: Iterable[Interval]) -> Intervals:
    """Drop empty intervals of an ascending sequence, and join adjacent ones."""
    merged: list[Interval] = []
    for start, stop in intervals:
        if start == stop:
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def _any_of(several: Iterable[Intervals]) -> Intervals:
    """The union of several sets of intervals."""
    merged: list[Interval] = []
    for start, stop in sorted(interval for intervals in several for interval in intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def whole(shape: tuple[int, ...]) -> Region:
    """The region of a whole tensor."""
    return tuple(((0, size),) if size else () for size in shape)


def length(intervals: Intervals) -> int:
    """The number of indices."""
    if len(intervals) == 1:
        ((start, stop),) = intervals
        return stop - start
    return sum([stop - start for start, stop in intervals])


def indices_at(intervals: Intervals, places: Interval) -> Intervals:
    """The indices that stand at some places among those of intervals."""
    taken, at = [], 0
    for start, stop in intervals:
        first, last = max(places[0] - at, 0), min(places[1] - at, stop - start)
        if first < last:
            taken.append((start + first, start + last))
        at += stop - start
    return tuple(taken)


def shape_of(region: Region) -> tuple[int, ...]:
    """The shape of a tensor that holds a region."""
    return tuple(map(length, region))


def volume(region: Region) -> int:
    """The number of elements."""
    return math.prod(map(length, region))


def is_region(region: Region) -> bool:
    """True if the intervals of each dimension ascend, and are neither empty nor adjacent."""
    return all(_ascend(intervals) for intervals in region)


def _ascend(intervals: Intervals) -> bool:
    last = -1
    for start, stop in intervals:
        if not last < start < stop:
            return False
        last = stop
    return True


def covers(held: Region, part: Region) -> bool:
    """True if the region `held` contains the region `part`."""
    return overlap(held, part) == part


def format_region(region: Region) -> str:
    """The text form of a region, such as `[0:4+8:12,0:64]`; an empty dimension is `0:0`."""
    return f"[{','.join(map(_format_intervals, region))}]"


def _format_intervals(intervals: Intervals) -> str:
    return "+".join(f"{start}:{stop}" for start, stop in intervals) or "0:0"


def overlap(one: Region, other: Region) -> Region:
    """The intersection of two regions."""
    return tuple(_common(a, b) for a, b in zip(one, other, strict=True))


def _common(one: Intervals, other: Intervals) -> Intervals:
    if one == other:
        return one
    common, left, right = [], 0, 0
    while left < len(one) and right < len(other):
        start = max(one[left][0], other[right][0])
        stop = min(one[left][1], other[right][1])
        if start < stop:
            common.append((start, stop))
        if one[left][1] < other[right][1]:
            left += 1
        else:
            right += 1
    return tuple(common)


def within(part: Region, held: Region) -> Region:
    """Where `part` is in a tensor that holds the region `held`, in indices of that tensor."""
    return tuple(_within(a, b) for a, b in zip(part, held, strict=True))


def _within(part: Intervals, held: Intervals) -> Intervals:
    intervals, at = [], 0
    for start, stop in held:
        intervals += [(at + a - start, at + b - start) for a, b in part if start <= a and b <= stop]
        at += stop - start
    return merge(intervals)


def logical(part: Region, held: Region) -> Region:
    """The logical region of `part`, in indices of a tensor that holds `held`: undoes `within`."""
    return tuple(
        merge(interval for positions in a for interval in indices_at(b, positions))
        for a, b in zip(part, held, strict=True)
    )


def union(regions: Iterable[Region]) -> Region:
    """The smallest region that contains all the regions."""
    return tuple(_any_of(intervals) for intervals in zip(*regions, strict=True))


def share(region: Region, index: int, count: int, dim: int | None = None) -> Region:
    """Piece `index` of `count` of a region, cut along `dim`, or along its longest dimension."""
    lengths = shape_of(region)
    if dim is None:
        dim = max(range(len(lengths)), key=lambda d: lengths[d], default=None)
    if dim is None:  # a scalar has one piece
        return region
    size = lengths[dim]
    return entries(region, dim, (index * size // count, (index + 1) * size // count))


def entries(region: Region, dim: int, wanted: Interval) -> Region:
    """The part of a region at some positions of a dimension.

    Args:
        region: the region.
        dim: the dimension.
        wanted: an interval of positions, counted among the indices that the region has there.
    """
    return (*region[:dim], indices_at(region[dim], wanted), *region[dim + 1 :])
