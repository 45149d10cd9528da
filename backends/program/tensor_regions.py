"""Take a region of a tensor, and put a tensor together from regions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import TypeAlias

import torch
from torch import Tensor

from ...ir.layout import Intervals, Region
from ...ir.types import TensorType
from ..dtypes import TORCH_DTYPES

_Box: TypeAlias = tuple[slice, ...]


def taking(region: Region, shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """Make a function that takes a region: a view, if each dimension has one interval."""
    parts = [
        (dim, intervals)
        for dim, (intervals, size) in enumerate(zip(region, shape, strict=True))
        if intervals != ((0, size),)
    ]

    def take(value: Tensor) -> Tensor:
        for dim, intervals in parts:
            value = _entries(value, dim, intervals)
        return value

    return take


def _entries(value: Tensor, dim: int, intervals: Intervals) -> Tensor:
    """The entries of a dimension at some indices, one behind the other."""
    if len(intervals) < 2:
        start, stop = intervals[0] if intervals else (0, 0)
        return value.narrow(dim, start, stop - start)
    return torch.cat([value.narrow(dim, start, stop - start) for start, stop in intervals], dim)


def assembling(
    type_: TensorType, regions: Sequence[Region], device: torch.device | None = None
) -> Callable[[Sequence[Tensor]], Tensor]:
    """Make a function that puts a tensor together from parts, each a region of it."""
    dtype, shape = TORCH_DTYPES[type_.dtype], type_.shape
    boxes = [(index, *box) for index, region in enumerate(regions) for box in _boxes(region)]

    def assemble(parts: Sequence[Tensor]) -> Tensor:
        whole = torch.empty(shape, dtype=dtype, device=device)
        for index, here, there in boxes:
            whole[here].copy_(parts[index][there])
        return whole

    return assemble


def reserving(
    type_: TensorType, regions: Sequence[Region], device: torch.device | None = None
) -> Callable[[], list[Tensor]]:
    """Make a function that allocates a tensor; it returns the whole, and views of regions."""
    dtype, shape = TORCH_DTYPES[type_.dtype], type_.shape
    parts = [taking(region, shape) for region in regions]

    def reserve() -> list[Tensor]:
        whole = torch.empty(shape, dtype=dtype, device=device)
        return [whole, *(part(whole) for part in parts)]

    return reserve


def _boxes(region: Region) -> list[tuple[_Box, _Box]]:
    """The indices of each block of a region: in the whole tensor, and in a tensor of the region."""
    dims: list[list[tuple[slice, slice]]] = []
    for intervals in region:
        slices, at = [], 0
        for start, stop in intervals:
            slices.append((slice(start, stop), slice(at, at + stop - start)))
            at += stop - start
        dims.append(slices)
    return [
        (tuple(here for here, _ in pairs), tuple(there for _, there in pairs))
        for pairs in product(*dims)
    ]
