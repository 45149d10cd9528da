"""Types of the IR: element types, places, and the types that values have.

A type says what a value is and *where* it is. A place is a tuple of ranks: one rank for a value
that an actor made, or several ranks that each hold a copy. A mesh is a place whose ranks form a
grid. A tensor may be laid out over the axes of its mesh (`layout.py`); its shape is then still that
of the whole, logical tensor.
Types are immutable and compare by value; their `str()` is the text form that the parser reads.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from .attributes import FastEnum, ReduceOp
from .layout import Cut, Layout, Position, Region, shape_of, whole


class DType(FastEnum):
    """The element type of a tensor; the value is its spelling in the text form.

    Attributes:
        itemsize: the bytes of one element.
        torch_name: the name of the same type in torch.
    """

    _value_: str
    itemsize: int
    torch_name: str

    F64 = "f64", 8, "float64"
    F32 = "f32", 4, "float32"
    F16 = "f16", 2, "float16"
    BF16 = "bf16", 2, "bfloat16"
    F8E4M3 = "f8e4m3", 1, "float8_e4m3fn"
    F8E5M2 = "f8e5m2", 1, "float8_e5m2"
    C64 = "c64", 8, "complex64"
    C128 = "c128", 16, "complex128"
    I64 = "i64", 8, "int64"
    I32 = "i32", 4, "int32"
    I16 = "i16", 2, "int16"
    I8 = "i8", 1, "int8"
    U64 = "u64", 8, "uint64"
    U32 = "u32", 4, "uint32"
    U16 = "u16", 2, "uint16"
    U8 = "u8", 1, "uint8"
    BOOL = "bool", 1, "bool"

    def __new__(cls, spelling: str, itemsize: int, torch_name: str) -> DType:
        member = object.__new__(cls)
        member._value_ = spelling
        member.itemsize = itemsize
        member.torch_name = torch_name
        return member

    @property
    def is_differentiable(self) -> bool:
        """True if a value of this type can have a gradient: if it is floating or complex."""
        return self.value[0] in "fc" or self is DType.BF16

    def __str__(self) -> str:
        return str(self.value)


class MemorySpace(FastEnum):
    """The memory that a tensor is in: that of its rank, or the host's beside a device."""

    DEVICE = "device"
    HOST = "host"


MOST_RANKS = 1 << 17
"""The most ranks of a world, so that a few letters in a file cannot take all memory."""


@dataclass(frozen=True, slots=True)
class Place:
    """The ranks that hold a value or run an op, in group order.

    The text form is `@3` for one rank, `@{0..3}` for a run of ranks, and `@{0,2,4..6}` in general.
    """

    ranks: tuple[int, ...]
    _positions: dict[int, Position] | None = field(
        init=False, repr=False, compare=False, default=None
    )

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ValueError("a place needs at least one rank")
        if len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"a place names a rank twice: {self.ranks}")

    @staticmethod
    def of(*ranks: int) -> Place:
        return Place(ranks)

    @property
    def is_single(self) -> bool:
        return len(self.ranks) == 1

    @property
    def rank(self) -> int:
        """The rank of a place with one rank.

        Raises:
            ValueError: the place has several ranks.
        """
        if len(self.ranks) != 1:
            raise ValueError(f"place {self} has several ranks")
        return self.ranks[0]

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The axes along which a tensor may be laid out, with their sizes, the major one first.

        A place that is no mesh has one axis, `*`, with the number of ranks as its size.
        """
        return (("*", len(self.ranks)),)

    def position(self, rank: int) -> Position:
        """The coordinate of a rank along each axis, and the size of the axis.

        Raises:
            ValueError: the place does not have this rank.
        """
        position = self.positions.get(rank)
        if position is None:
            raise ValueError(f"rank {rank} is not of the place {self}")
        return position

    @property
    def positions(self) -> Mapping[int, Position]:
        """For each rank its coordinate along each axis, and the size of the axis."""
        if self._positions is None:
            names = [axis for axis, _ in self.axes]
            sizes = [size for _, size in self.axes]
            grid = itertools.product(*map(range, sizes))
            positions = {
                rank: dict(zip(names, zip(coordinates, sizes, strict=True), strict=True))
                for rank, coordinates in zip(self.ranks, grid, strict=True)
            }
            # Computed once, as positions are read again and again.
            object.__setattr__(self, "_positions", positions)
            return positions
        return self._positions

    def fibre(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axes` only, in the order of the place.

        Raises:
            ValueError: the place does not have this rank.
        """
        here = self.position(rank)
        first, stride, offsets = 0, 1, [0]
        for axis, size in reversed(self.axes):
            if axis in axes:
                offsets = [k * stride + offset for k in range(size) for offset in offsets]
            else:
                first += here[axis][0] * stride
            stride *= size
        return tuple([self.ranks[first + offset] for offset in offsets])

    def covers(self, other: Place) -> bool:
        """True if every rank of `other` is one of this place's ranks."""
        return set(other.ranks) <= set(self.ranks)

    def __contains__(self, rank: int) -> bool:
        return rank in self.ranks

    def __str__(self) -> str:
        if self.is_single:
            return f"@{self.ranks[0]}"
        return f"@{format_ranks(self.ranks)}"


_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Mesh(Place):
    """Ranks as a grid with named axes; the last axis varies fastest. The text form is `@name`.

    A module declares its meshes: `mesh @name {dp = 2, tp = 2, ranks = {0..3}}`.

    Attributes:
        name: unique in the module.
        grid: the axes and their sizes, the major one first.
    """

    name: str = ""
    grid: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        Place.__post_init__(self)
        names = [axis for axis, _ in self.grid]
        for word in (self.name, *names):
            if not _WORD.fullmatch(word) or word == "ranks":
                raise ValueError(f"'{word}' is no name for a mesh or an axis; write one such as tp")
        if len(set(names)) != len(names):
            raise ValueError(f"mesh @{self.name} has two axes of one name: {', '.join(names)}")
        if math.prod(size for _, size in self.grid) != len(self.ranks):
            sizes = " x ".join(f"{axis} = {size}" for axis, size in self.grid) or "no axes"
            raise ValueError(
                f"mesh @{self.name} has {len(self.ranks)} ranks, which its axes are not: {sizes}"
            )

    @staticmethod
    def of_grid(ranks: tuple[int, ...], grid: tuple[tuple[str, int], ...]) -> Mesh:
        """A mesh that is named by its axes and ranks, so that equal meshes have equal names."""
        name = "_".join(f"{axis}{size}" for axis, size in grid)
        first = ranks[0]
        if ranks == tuple(range(first, first + len(ranks))):
            suffix = f"_at{first}" if first else ""
        else:
            suffix = "_at" + "_".join(map(str, ranks))
        return Mesh(ranks, f"{name}{suffix}", grid)

    def unbind(self, axis: str) -> tuple[Mesh, ...]:
        """Split the mesh along an axis: pp = 2, tp = 4 gives, along pp, two meshes of four ranks.

        Raises:
            ValueError: the mesh has no such axis, or no other axis.
        """
        sizes = dict(self.grid)
        axes = ", ".join(f"{name} = {size}" for name, size in self.grid)
        if axis not in sizes:
            raise ValueError(f"the mesh {{{axes}}} has no axis '{axis}'")
        rest = tuple((name, size) for name, size in self.grid if name != axis)
        if not rest:
            raise ValueError(
                f"the mesh {{{axes}}} has no axis but '{axis}'; its parts are single ranks: "
                f"{list(self.ranks)}"
            )
        parts: list[list[int]] = [[] for _ in range(sizes[axis])]
        for rank in self.ranks:
            parts[self.position(rank)[axis][0]].append(rank)
        return tuple(Mesh.of_grid(tuple(part), rest) for part in parts)

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        return self.grid

    def __str__(self) -> str:
        return f"@{self.name}"


def format_ranks(ranks: tuple[int, ...]) -> str:
    """Write ranks as `{0..3,7}`; runs of two or more consecutive ranks are shortened."""
    parts: list[str] = []
    start = 0
    while start < len(ranks):
        end = start
        while end + 1 < len(ranks) and ranks[end + 1] == ranks[end] + 1:
            end += 1
        parts.append(str(ranks[start]) if end == start else f"{ranks[start]}..{ranks[end]}")
        start = end + 1
    return "{" + ",".join(parts) + "}"


@dataclass(frozen=True, slots=True)
class TensorType:
    """A dense tensor: `f32[8,512]@0`; in a scheduled program, `f32[8,512]` or `f32[8,512]:host`.

    Attributes:
        dtype: the type of the elements.
        shape: the shape of the whole tensor, however it is laid out.
        place: the ranks that hold it, or parts of it; None in a scheduled program.
        layout: how it is laid out over the axes of the place, as in `f32[8/dp,64|+tp]@m`. None:
            each rank holds a copy of the whole.
        space: the memory that it is in. Only copies between memories name the host's, in scheduled
            programs.
    """

    dtype: DType
    shape: tuple[int, ...]
    place: Place | None = None
    layout: Layout | None = None
    space: MemorySpace = MemorySpace.DEVICE
    _regions: dict[int, Region] | None = field(init=False, repr=False, compare=False, default=None)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the elements of the whole tensor, stored contiguously."""
        return self.numel * self.dtype.itemsize

    def region(self, rank: int) -> Region:
        """The part of the tensor that a rank of its place has a copy or summand of."""
        if self.layout is None:
            return whole(self.shape)
        return self.regions()[rank]

    def regions(self) -> Mapping[int, Region]:
        """For each rank of its place, the part of the tensor that it has a copy or summand of."""
        assert self.place is not None, "a type without a place has no ranks"
        if self.layout is None:
            return dict.fromkeys(self.place.ranks, whole(self.shape))
        if self._regions is None:
            layout, positions = self.layout, self.place.positions
            regions = {rank: layout.region(self.shape, at) for rank, at in positions.items()}
            # Computed once, as the tensors of a step share few types.
            object.__setattr__(self, "_regions", regions)
            return regions
        return self._regions

    def local(self, rank: int) -> TensorType:
        """The type, without a place, of the part that a rank holds."""
        if self.layout is None:
            return TensorType(self.dtype, self.shape)
        return TensorType(self.dtype, shape_of(self.region(rank)))

    def __str__(self) -> str:
        dims = ",".join(map(str, self.shape))
        if self.layout is not None:
            dims = _layout(self.shape, self.layout)
        space = ":host" if self.space is MemorySpace.HOST else ""
        return f"{self.dtype}[{dims}]{_suffix(self.place)}{space}"


@dataclass(frozen=True, slots=True)
class ObjectType:
    """Any Python object; its size is known only at run time: `object@0`."""

    place: Place | None = None

    def __str__(self) -> str:
        return f"object{_suffix(self.place)}"


@dataclass(frozen=True, slots=True)
class UnitType:
    """A value without content, which says that an op has happened: `unit@0`."""

    place: Place | None = None

    def __str__(self) -> str:
        return f"unit{_suffix(self.place)}"


@dataclass(frozen=True, slots=True)
class FutureType:
    """A value that a communication op promises, and that only `wait` takes: `future<T>`."""

    value: ValueType

    @property
    def place(self) -> Place | None:
        return self.value.place

    def __str__(self) -> str:
        return f"future<{self.value}>"


ValueType: TypeAlias = TensorType | ObjectType | UnitType
Type: TypeAlias = ValueType | FutureType


def promised(type_: Type) -> ValueType:
    """The type that a future promises; any other type as it is."""
    return type_.value if isinstance(type_, FutureType) else type_


def tensor_bytes(type_: Type) -> int:
    """The bytes of a tensor, or of a promised one; 0 for all else, whose size is not known."""
    value = promised(type_)
    return value.nbytes if isinstance(value, TensorType) else 0


def is_on_host(type_: Type) -> bool:
    """True for a tensor, or a promised one, in the memory of the host beside a device."""
    value = promised(type_)
    return isinstance(value, TensorType) and value.space is MemorySpace.HOST


def device_bytes(type_: Type) -> int:
    """The bytes of a tensor, or of a promised one, that is not in a host's memory; 0 for others."""
    return 0 if is_on_host(type_) else tensor_bytes(type_)


def _layout(shape: tuple[int, ...], layout: Layout) -> str:
    """The dimensions of a tensor with their cuts, then the axes of summands.

    An example is `8/dp,3*64/tp|+ep`. In `8x7/dp` a dimension has 8 units of 7, in `16/cp~` it is in
    zigzag order, and in `16/cp+1` each rank has the piece of the rank ahead of it.
    """
    dims = []
    for size, cut in zip(shape, layout.cuts, strict=True):
        dims.append(f"{_packed(size, cut)}/{cut.text}" if cut else str(size))
    text = ",".join(dims)
    if not layout.summands:
        return text
    sign = "+" if layout.reduce is ReduceOp.SUM else f"{layout.reduce.value}:"
    return f"{text}|{sign}{'.'.join(layout.summands)}"


def _packed(size: int, cut: Cut) -> str:
    block = size // cut.blocks
    units = f"{block // cut.unit}x{cut.unit}" if cut.unit > 1 else str(block)
    return f"{cut.blocks}*{units}" if cut.blocks > 1 else units


def _suffix(place: Place | None) -> str:
    return "" if place is None else str(place)


def relocate(type_: Type, place: Place | None) -> Type:
    """The same type at another place; None: the place that the program implies."""
    if type(type_) is TensorType:  # the most frequent case; `replace` takes three times as long
        return TensorType(type_.dtype, type_.shape, place, type_.layout, type_.space)
    if isinstance(type_, FutureType):
        return FutureType(replace(type_.value, place=place))
    return replace(type_, place=place)
