"""Tensors that are made up of parts of stored tensors: stacked, joined, cut, permuted, reshaped.

A composition consists of blocks. Each block is a box of the tensor, and its elements lie in one
stored tensor at equal distances. So a region of the tensor is read from boxes of stored tensors,
and a rank's piece of the tensor is written to regions of them, without all the rest.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import torch

from ...ir.layout import Interval, Intervals, Region, merge

T = TypeVar("T")

Box: TypeAlias = tuple[Interval, ...]
"""An interval of indices for each dimension."""


@dataclass(frozen=True, slots=True)
class StoredAxis:
    """The way of one dimension of a block through its stored tensor.

    Attributes:
        dim: of the stored tensor.
        step: from one index of the block to the next; 0 if the block has one index there, and the
            stored tensor has no such dimension.
    """

    dim: int
    step: int


_STAYS = StoredAxis(0, 0)


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A box of a tensor that lies in one stored tensor.

    Attributes:
        name: of the stored tensor.
        box: in the tensor.
        start: the index of its first element in the stored tensor.
        axes: for each dimension of the tensor.
    """

    name: str
    box: Box
    start: tuple[int, ...]
    axes: tuple[StoredAxis, ...]

    def narrowed(self, dim: int, begin: int, end: int) -> StoredBlock:
        """The block without the indices of one dimension that lie outside of an interval."""
        axis, start = self.axes[dim], list(self.start)
        if axis.step:
            start[axis.dim] += axis.step * (begin - self.box[dim][0])
        return replace(self, start=tuple(start), box=_put(self.box, dim, (begin, end)))


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of a stored tensor that a region of a tensor has.

    Attributes:
        name: of the stored tensor.
        inside: where it is in a piece with that region.
        start: its first element in the stored tensor.
        sizes, axes: for each dimension of the piece.
    """

    name: str
    inside: tuple[slice, ...]
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    axes: tuple[StoredAxis, ...]

    @property
    def box(self) -> tuple[slice, ...]:
        """The smallest box of the stored tensor that has all of it."""
        stops = [first + 1 for first in self.start]
        for size, axis in zip(self.sizes, self.axes, strict=True):
            if axis.step:
                stops[axis.dim] += axis.step * (size - 1)
        return tuple(slice(a, b) for a, b in zip(self.start, stops, strict=True))

    def taken_from(self, boxed: torch.Tensor) -> torch.Tensor:
        """Its elements in the order of the piece, as a view of the box."""
        strides = [axis.step and axis.step * boxed.stride(axis.dim) for axis in self.axes]
        return boxed.as_strided(self.sizes, strides, boxed.storage_offset())

    def put_back(self, piece: torch.Tensor) -> tuple[torch.Tensor, Region]:
        """Its elements of a piece in the order of the stored tensor, and their region there."""
        order: list[int] = []
        shape, region = [], []
        for dim, first in enumerate(self.start):
            mine = [d for d, axis in enumerate(self.axes) if axis.step and axis.dim == dim]
            mine.sort(key=lambda d: -self.axes[d].step)
            indices = _sums(
                [range(0, self.axes[d].step * self.sizes[d], self.axes[d].step) for d in mine]
            )
            order += mine
            shape.append(math.prod(self.sizes[d] for d in mine))
            region.append(_runs(first, indices))
        order += [d for d, axis in enumerate(self.axes) if not axis.step]
        return piece[self.inside].permute(order).reshape(shape), tuple(region)


@dataclass(frozen=True, slots=True)
class Composition:
    """A tensor that is made up of parts of stored tensors.

    Attributes:
        shape: of the tensor.
        blocks: which do not overlap, and cover it.
    """

    shape: tuple[int, ...]
    blocks: tuple[StoredBlock, ...]

    @staticmethod
    def of(name: str, shape: tuple[int, ...]) -> Composition:
        """A stored tensor as it is."""
        axes = tuple(StoredAxis(dim, 1) for dim in range(len(shape)))
        box = tuple((0, size) for size in shape)
        return Composition(shape, (StoredBlock(name, box, (0,) * len(shape), axes),))

    @property
    def names(self) -> tuple[str, ...]:
        """The stored tensors that it has parts of."""
        return tuple(dict.fromkeys(block.name for block in self.blocks))

    @property
    def elements(self) -> Counter[str]:
        """The number of its elements in each stored tensor."""
        count: Counter[str] = Counter()
        for block in self.blocks:
            count[block.name] += math.prod(end - begin for begin, end in block.box)
        return count

    def parts(self, region: Region) -> Iterator[StoredPart]:
        """The parts of stored tensors that a region has."""
        for block in self.blocks:
            cuts = (_overlaps(runs, side) for runs, side in zip(region, block.box, strict=True))
            for chosen in itertools.product(*cuts):
                part = block
                for dim, (_, side) in enumerate(chosen):
                    part = part.narrowed(dim, *side)
                sizes = tuple(end - begin for begin, end in part.box)
                inside = tuple(inner for inner, _ in chosen)
                yield StoredPart(block.name, inside, part.start, sizes, block.axes)

    # -- operations of tensors -----------------------------------------------------------------

    def narrowed(self, dim: int, begin: int, end: int) -> Composition:
        """The indices of an interval of one dimension."""
        blocks = []
        for block in self.blocks:
            first, last = block.box[dim]
            side = max(first, begin), min(last, end)
            if side[0] < side[1]:
                blocks.append(_moved(block.narrowed(dim, *side), dim, -begin))
        return Composition(_put(self.shape, dim, end - begin), tuple(blocks))

    def permuted(self, order: Sequence[int]) -> Composition:
        """The dimensions in another order."""
        blocks = (
            replace(b, box=_picked(b.box, order), axes=_picked(b.axes, order)) for b in self.blocks
        )
        return Composition(_picked(self.shape, order), tuple(blocks))

    def unsqueezed(self, dim: int) -> Composition:
        """One more dimension, of one index, in front of `dim`."""
        blocks = (
            replace(b, box=_inserted(b.box, dim, (0, 1)), axes=_inserted(b.axes, dim, _STAYS))
            for b in self.blocks
        )
        return Composition(_inserted(self.shape, dim, 1), tuple(blocks))

    def squeezed(self, dim: int) -> Composition:
        """Without a dimension of one index."""
        keep = [d for d in range(len(self.shape)) if d != dim]
        return self.permuted(keep)

    def viewed(self, shape: Sequence[int]) -> Composition:
        """The elements in the same order, in another shape."""
        sizes, result, dim = list(shape), self, 0
        while result.shape != tuple(sizes):
            if dim == len(sizes):  # what is left are dimensions of one index
                result = result.squeezed(dim)
                continue
            if dim == len(result.shape):
                result = result.unsqueezed(dim)
            elif result.shape[dim] > sizes[dim] > 0 and not result.shape[dim] % sizes[dim]:
                result = result._split(dim, sizes[dim])
            elif result.shape[dim] != sizes[dim]:
                result = result._joined(dim)
                continue
            dim += 1
        return result

    def _split(self, dim: int, outer: int) -> Composition:
        """A dimension as two, of which the first has `outer` indices."""
        inner = self.shape[dim] // outer
        blocks: list[StoredBlock] = []
        for block in self.blocks:
            axis = block.axes[dim]
            axes = (replace(axis, step=axis.step * inner), axis)
            for part, rows, columns in _rows(block, dim, inner):
                box = (*part.box[:dim], rows, columns, *part.box[dim + 1 :])
                ways = (*part.axes[:dim], *axes, *part.axes[dim + 1 :])
                blocks.append(replace(part, box=box, axes=ways))
        shape = (*self.shape[:dim], outer, inner, *self.shape[dim + 1 :])
        return Composition(shape, tuple(blocks))

    def _joined(self, dim: int) -> Composition:
        """A dimension and the next one as one."""
        inner = self.shape[dim + 1]
        blocks: list[StoredBlock] = []
        for block in self.blocks:
            (first, last), (begin, end) = block.box[dim : dim + 2]
            outer_axis, axis = block.axes[dim : dim + 2]
            if end - begin == inner == 1:
                axis = outer_axis
            follows = outer_axis == replace(axis, step=axis.step * inner)
            if end - begin == inner and (follows or inner == 1):
                pieces = [(block, first * inner, last * inner)]
            else:
                pieces = [
                    (block.narrowed(dim, row, row + 1), row * inner + begin, row * inner + end)
                    for row in range(first, last)
                ]
            for part, start, stop in pieces:
                box = (*part.box[:dim], (start, stop), *part.box[dim + 2 :])
                ways = (*part.axes[:dim], axis, *part.axes[dim + 2 :])
                blocks.append(replace(part, box=box, axes=ways))
        shape = (*self.shape[:dim], self.shape[dim] * inner, *self.shape[dim + 2 :])
        return Composition(shape, tuple(blocks))


def joined(compositions: Iterable[Composition], dim: int) -> Composition:
    """Compositions one behind the other along a dimension.

    Raises:
        ValueError: their other dimensions differ.
    """
    several = list(compositions)
    if len({_put(composition.shape, dim, 0) for composition in several}) > 1:
        shapes = " and ".join(sorted({str(list(composition.shape)) for composition in several}))
        raise ValueError(f"tensors of the shapes {shapes} are joined along dimension {dim}")
    blocks: list[StoredBlock] = []
    at = 0
    for composition in several:
        blocks += (_moved(block, dim, at) for block in composition.blocks)
        at += composition.shape[dim]
    return Composition(_put(several[0].shape, dim, at), tuple(blocks))


def _rows(
    block: StoredBlock, dim: int, inner: int
) -> Iterator[tuple[StoredBlock, Interval, Interval]]:
    """The parts of a block that are boxes if a dimension becomes rows of `inner` indices.

    Each comes with its rows, and its columns.
    """
    begin, end = block.box[dim]
    while begin < end:
        row, column = divmod(begin, inner)
        if column == 0 and end - begin >= inner:
            stop = end - end % inner
            rows, columns = (row, stop // inner), (0, inner)
        else:
            stop = min(end, (row + 1) * inner)
            rows, columns = (row, row + 1), (column, column + stop - begin)
        yield block.narrowed(dim, begin, stop), rows, columns
        begin = stop


def _moved(block: StoredBlock, dim: int, by: int) -> StoredBlock:
    begin, end = block.box[dim]
    return replace(block, box=_put(block.box, dim, (begin + by, end + by)))


def _overlaps(intervals: Intervals, side: Interval) -> list[tuple[slice, Interval]]:
    """What intervals share with another one: the place among their indices, and the indices."""
    shared, at = [], 0
    for start, stop in intervals:
        begin, end = max(start, side[0]), min(stop, side[1])
        if begin < end:
            shared.append((slice(at + begin - start, at + end - start), (begin, end)))
        at += stop - start
    return shared


def _sums(ranges: Sequence[range]) -> Sequence[int]:
    """The sums of one number of each range, the last range running fastest."""
    if len(ranges) == 1:
        return ranges[0]
    return [sum(numbers) for numbers in itertools.product(*ranges)]


def _runs(first: int, indices: Sequence[int]) -> Intervals:
    """Ascending indices as intervals, behind `first`."""
    if isinstance(indices, range) and indices.step == 1:
        return ((first, first + len(indices)),)
    return merge((first + index, first + index + 1) for index in indices)


def _put(values: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _inserted(values: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    return (*values[:at], value, *values[at:])


def _picked(values: tuple[T, ...], order: Sequence[int]) -> tuple[T, ...]:
    return tuple(values[index] for index in order)
