"""A tensor of a model in files, read from the stored tensors that it consists of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from ...ir.layout import Region, shape_of, whole
from ..conversions.composition import Composition

ReadBox: TypeAlias = Callable[[str, tuple[slice, ...]], torch.Tensor]
"""Reads a box of a tensor of an open file, by its name; nobody writes to what it returns."""


class WeightFile(Protocol):
    """A file of tensors: their shapes and element types by name, and what is in boxes of them."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype | None]

    def __contains__(self, name: str) -> bool: ...

    def opened(self) -> AbstractContextManager[ReadBox]: ...


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a model that can be read.

    Attributes:
        composition: the parts of stored tensors that it consists of.
        files: the file of each stored tensor.
    """

    composition: Composition
    files: Mapping[str, WeightFile]

    @property
    def dtypes(self) -> dict[str, torch.dtype | None]:
        """The element types of the stored tensors, by name."""
        return {name: self.files[name].dtypes[name] for name in self.composition.names}

    def is_whole(self, name: str) -> bool:
        """Whether it is the stored tensor of that name, as it is."""
        file = self.files.get(name)
        return file is not None and self.composition == Composition.of(name, file.shapes[name])

    def equals(self, other: StoredTensor) -> bool:
        """Whether another one has the same shape and numbers."""
        if self.composition.shape != other.composition.shape:
            return False
        return all(
            torch.equal(self.read(rows, torch.float64), other.read(rows, torch.float64))
            for rows in _few_rows(self.composition.shape)
        )

    def check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Compare the shape and element type with those of an actor's tensor.

        Raises:
            ValueError: it has another shape or element type.
        """
        if self.composition.shape != shape:
            stored = list(self.composition.shape)
            raise ValueError(f"'{name}' is {stored} in the file, and {list(shape)} here")
        for source, stored_dtype in self.dtypes.items():
            if stored_dtype != dtype:
                raise ValueError(f"'{source}' is {stored_dtype} in the file, and {dtype} here")

    def read(self, region: Region, dtype: torch.dtype) -> torch.Tensor:
        """The part of the tensor in a region, as an element type; only that part is read.

        Files are opened for this tensor alone. Otherwise the pages that have been read would stay
        in memory beside the tensors.

        Raises:
            OSError: a file cannot be read.
        """
        value = torch.empty(shape_of(region), dtype=dtype)
        opened: dict[int, ReadBox] = {}
        with ExitStack() as stack:
            for part in self.composition.parts(region):
                file = self.files[part.name]
                if id(file) not in opened:
                    opened[id(file)] = stack.enter_context(file.opened())
                boxed = opened[id(file)](part.name, part.box)
                value[part.inside] = part.taken_from(boxed)
        return value


def _few_rows(shape: tuple[int, ...]) -> Iterator[Region]:
    """Regions of a few rows each, which cover a tensor."""
    if not shape:
        yield ()
        return
    for start in range(0, shape[0], _ROWS):
        yield ((start, min(start + _ROWS, shape[0])),), *whole(shape[1:])


_ROWS = 1 << 12
