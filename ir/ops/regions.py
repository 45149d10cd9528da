"""Ops on regions: take a part of a laid-out tensor, and put a tensor together from parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

from ..layout import Region, covers, format_region, is_region, overlap, shape_of, volume, whole
from ..phases import Phase
from ..types import Place, TensorType
from .base import Op, Value
from .rules import (
    CheckContext,
    Problem,
    expect_operands,
    expect_results,
    expect_tensor,
    expect_type,
)

_PHASES = frozenset({Phase.PLACED, Phase.ASYNC, Phase.SCHEDULED})


@dataclass(eq=False, slots=True)
class Slice(Op):
    """The part of a tensor in `region`, at one of the ranks that hold it.

    `region` lists for each dimension the intervals `first:last`, with `+` between them, as in
    `[0:4,0:64]` and `[0:4+8:12]`. It is in indices of the logical tensor, and within the part that
    the rank holds. In a rank's program it is in indices of the operand. The result may share the
    operand's storage.
    """

    opcode: ClassVar[str] = "slice"
    takes: ClassVar[str] = "a tensor, however it is laid out"
    gives: ClassVar[str] = "a tensor of the region's shape, at one rank"
    phases: ClassVar[frozenset[Phase]] = _PHASES
    remedy: ClassVar[str] = "lower-transfers makes it"
    shares_operand: ClassVar[bool] = True
    takes_layouts: ClassVar[bool] = True
    takes_summands: ClassVar[bool] = True
    region: Region = field(default=(), kw_only=True)

    @property
    def copies(self) -> bool:
        """True if a rank has to copy elements, as a dimension has several intervals."""
        return any(len(intervals) > 1 for intervals in self.region)

    def check(self, context: CheckContext) -> None:
        expect_operands(self, 1, "one operand")
        expect_results(self, 1, "one result")
        source = expect_tensor(self.operands[0], self)
        _check_region(self, self.region, whole(source.shape), "the operand", self.operands[0])
        expected = TensorType(source.dtype, shape_of(self.region))
        expect_type(self.result, expected, "the region makes")

    def check_places(self, context: CheckContext) -> None:
        place = self.result.type.place
        assert place is not None, "before SCHEDULED a value has a place"
        if not place.is_single:
            raise Problem(
                f"slice runs at one rank, %{self.result.name} is at {place}",
                "take a slice at each rank",
                self.result,
            )

    def check_operand_places(self, context: CheckContext) -> None:
        Op.check_operand_places(self, context)
        (value,) = self.operands
        place = self.result.type.place
        assert place is not None, "before SCHEDULED a value has a place"
        held = expect_tensor(value, self).region(place.rank)
        _check_region(self, self.region, held, f"what rank {place.rank} holds", value)


@dataclass(eq=False, slots=True)
class Reserve(Op):
    """Uninitialised storage for a tensor, and for each part of it a buffer to write.

    The first result is the whole tensor. The others are buffers, one for each of `regions`: blocks
    that tile the whole. A buffer is that part of the whole. One `recv` or `copy` writes each
    buffer, and then `assemble` gives the whole its value.
    """

    opcode: ClassVar[str] = "reserve"
    takes: ClassVar[str] = "none"
    gives: ClassVar[str] = "a tensor, then a buffer for each region"
    phases: ClassVar[frozenset[Phase]] = frozenset({Phase.SCHEDULED})
    remedy: ClassVar[str] = "assemble-in-place makes it, in scheduled programs"
    regions: tuple[Region, ...] = field(default=(), kw_only=True)

    def check(self, context: CheckContext) -> None:
        expect_operands(self, 0, "no operand")
        expect_results(self, len(self.regions) + 1, "the whole, and a buffer for each region")
        whole_, *buffers = self.results
        type_ = expect_tensor(whole_, self)
        for value, region in zip(buffers, self.regions, strict=True):
            _check_region(self, region, whole(type_.shape), f"%{whole_.name}", value)
            if any(len(intervals) > 1 for intervals in region):
                raise Problem(
                    f"the region {format_region(region)} is no block: a dimension has several "
                    "intervals",
                    "reserve a buffer for each block",
                    value,
                )
            expect_type(value, TensorType(type_.dtype, shape_of(region)), "its region has")
        _check_tiles(self.regions, whole(type_.shape), "the whole")


@dataclass(eq=False, slots=True)
class Assemble(Op):
    """The tensor whose parts are the operands: each rank puts the operands that it has together.

    `regions` has one region for each operand, in indices of the logical tensor. At each rank of the
    result, the regions of the rank's operands are disjoint, and together they are the part of the
    result that the rank holds. In a rank's program the regions are in indices of its own result.

    The result has storage of its own, unless it is assembled *in place*. Then the first operand is
    the whole of a `reserve`, and the others are the values written to its buffers. The result is
    the whole, and nothing is copied.
    """

    opcode: ClassVar[str] = "assemble"
    takes: ClassVar[str] = "tensors, each of its region's shape"
    gives: ClassVar[str] = "a tensor, however it is laid out"
    phases: ClassVar[frozenset[Phase]] = _PHASES
    remedy: ClassVar[str] = "lower-transfers makes it"
    takes_layouts: ClassVar[bool] = True
    takes_summands: ClassVar[bool] = True
    regions: tuple[Region, ...] = field(default=(), kw_only=True)

    @property
    def is_in_place(self) -> bool:
        """True if the first operand is storage that already has the parts in it."""
        return len(self.operands) == len(self.regions) + 1

    @property
    def parts(self) -> tuple[Value, ...]:
        """The operands that have a region."""
        return self.operands[1:] if self.is_in_place else self.operands

    @property
    def shared_operand(self) -> Value | None:
        return self.operands[0] if self.is_in_place else None

    @property
    def operand_places(self) -> tuple[Place | None, ...]:
        return tuple([value.type.place for value in self.operands])

    def by_rank(self) -> dict[int, list[tuple[Value, Region]]]:
        """The operands of each rank with their regions, in a program over all ranks."""
        assert self.place is not None, "before SCHEDULED a value has a place"
        parts_of: dict[int, list[tuple[Value, Region]]] = {rank: [] for rank in self.place.ranks}
        for value, region in zip(self.operands, self.regions, strict=True):
            assert value.type.place is not None, "before SCHEDULED a value has a place"
            for rank in value.type.place.ranks:
                parts_of[rank].append((value, region))
        return parts_of

    def check(self, context: CheckContext) -> None:
        expect_results(self, 1, "one result")
        type_ = expect_tensor(self.result, self)
        if self.is_in_place and context.phase is Phase.SCHEDULED:
            expect_type(self.operands[0], type_, "what is assembled in it is")
        elif len(self.operands) != len(self.regions):
            raise Problem(
                f"assemble has {len(self.operands)} operands and {len(self.regions)} regions",
                "give one region for each operand",
            )
        for value, region in zip(self.parts, self.regions, strict=True):
            expect_tensor(value, self)
            _check_region(self, region, whole(type_.shape), f"%{self.result.name}", value)
            expect_type(value, TensorType(type_.dtype, shape_of(region)), "its region has")
        if context.phase is Phase.SCHEDULED:
            _check_tiles(self.regions, whole(type_.shape), "the result")

    def check_operand_places(self, context: CheckContext) -> None:
        type_ = expect_tensor(self.result, self)
        assert type_.place is not None, "before SCHEDULED a value has a place"
        for value in self.operands:
            place = value.type.place
            if place is not None and not type_.place.covers(place):
                raise Problem(
                    f"%{value.name} is at {place}, this assemble makes a tensor at {type_.place}",
                    "an operand is at ranks of the result alone",
                    value,
                )
        pieces = type_.regions()
        for rank, parts in self.by_rank().items():
            regions = [region for _, region in parts]
            _check_tiles(regions, pieces[rank], f"the part of rank {rank}")


def _check_region(op: Op, region: Region, held: Region, noun: str, value: Value) -> None:
    """Raise unless `region` is well formed, and within the region `held`, which `noun` names."""
    if not is_region(region):
        raise Problem(
            f"{format_region(region)} is not a region: intervals ascend, and neither touch nor are "
            "empty",
            "write 0:4+8:12; an empty dimension is 0:0",
            value,
        )
    if len(region) != len(held):
        text = format_region(region)
        problem = f"the region {text} has {len(region)} dimensions, {noun} has {len(held)}"
        raise Problem(problem, "write one for each dimension of the tensor", value)
    if not covers(held, region):
        raise Problem(
            f"the region {format_region(region)} is not within {noun}, {format_region(held)}",
            f"{op.opcode} takes indices of the logical tensor, and of a rank what it holds",
            value,
        )


def _check_tiles(regions: Sequence[Region], piece: Region, noun: str) -> None:
    """Raise unless regions tile a piece, which `noun` names."""
    disjoint = _are_rows(regions)
    for index, region in enumerate(regions):
        if not covers(piece, region):
            raise Problem(
                f"the region {format_region(region)} is not within {noun}, {format_region(piece)}",
                "an operand is part of what its ranks hold of the result",
            )
        for earlier in () if disjoint else regions[:index]:
            if common := volume(overlap(region, earlier)):
                raise Problem(
                    f"the regions {format_region(earlier)} and {format_region(region)} of {noun} "
                    f"have {common} elements in common",
                    "regions of one rank are disjoint",
                )
    missing = volume(piece) - sum(map(volume, regions))
    if missing:
        raise Problem(
            f"{missing} elements of {noun}, {format_region(piece)}, are in no region",
            "regions of one rank are together all that it holds of the result",
        )


def _are_rows(regions: Sequence[Region]) -> bool:
    """True if regions differ in one dimension only, and are disjoint there."""
    columns = [column for column in zip(*regions, strict=True) if len(set(column)) > 1]
    if len(columns) != 1:
        return False
    intervals = sorted(interval for column in columns[0] for interval in column)
    return all(one[1] <= other[0] for one, other in pairwise(intervals))
