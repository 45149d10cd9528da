"""Random transfers between layouts, what ranks hold before and after, and plans run on arrays."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cg.ir.attributes import Effect, ReduceOp, Symbol
from cg.ir.layout import Cut, Layout, Region
from cg.ir.ops import Call, Return, Transfer, Value
from cg.ir.ops.module import Function, FunctionKind, Module, Program
from cg.ir.phases import Phase
from cg.ir.types import DType, Mesh, Place, TensorType, UnitType
from cg.passes.placement.resharding_plan import (
    CombineRound,
    GatherRound,
    MoveRound,
    ReduceRound,
    RegionMessage,
    RegionMessages,
    ReshardingPlan,
)

WORLD = 8
GRIDS = ((1,), (2,), (3,), (4,), (5,), (2, 2), (2, 3), (3, 2), (4, 2), (2, 1, 2), (2, 2, 2))
NAMES = ("dp", "cp", "tp")
COMBINE: Mapping[ReduceOp, Any] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
}

Types = tuple[TensorType, TensorType]
"""Of a tensor before a transfer, and after it."""

shapes = st.lists(st.sampled_from((0, 1, 2, 3, 4, 5, 6, 8, 12)), max_size=3).map(tuple)


@st.composite
def places(draw: Any, name: str, world: int) -> Place:
    """A bare place, or a mesh of some name; its ranks may be in any order."""
    ranks = tuple(draw(st.permutations(range(world))))
    if draw(st.booleans()):
        return Place(ranks[: draw(st.integers(1, 5))])
    sizes = draw(st.sampled_from([grid for grid in GRIDS if math.prod(grid) <= world]))
    grid = tuple(zip(NAMES, sizes, strict=False))
    return Mesh(ranks[: math.prod(sizes)], name, grid)


@st.composite
def layouts(draw: Any, shape: tuple[int, ...], place: Place, sums: bool) -> Layout | None:
    """Any layout of a shape over a place; with `sums`, ranks may hold summands."""
    axes = draw(st.permutations([axis for axis, _ in place.axes]))
    cuts: list[list[str]] = [[] for _ in shape]
    summed = set()
    for axis in axes:
        kind = draw(st.sampled_from(("cut", "cut", "sum", "copy")))
        if kind == "cut" and shape:
            cuts[draw(st.integers(0, len(shape) - 1))].append(axis)
        elif kind == "sum" and sums:
            summed.add(axis)
    return Layout.of(
        [_cut(draw, place, tuple(cut), size) for cut, size in zip(cuts, shape, strict=True)],
        tuple(axis for axis, _ in place.axes if axis in summed),
        draw(st.sampled_from(tuple(COMBINE))) if summed else ReduceOp.SUM,
    )


def _cut(draw: Any, place: Place, axes: tuple[str, ...], size: int) -> Cut:
    if not axes:
        return Cut()
    blocks = draw(st.sampled_from([n for n in (1, 2, 3) if not size % n]))
    units = draw(st.sampled_from([n for n in (1, 1, 2) if not size // blocks % n]))
    pieces = math.prod(length for axis, length in place.axes if axis in axes)
    zigzag, shift = draw(st.sampled_from((*[(False, 0)] * 6, (True, 0), (False, pieces - 1))))
    return Cut(axes, blocks, units, zigzag, shift)


@st.composite
def transfers(draw: Any, before: bool = True, after: bool = True, world: int = WORLD) -> Types:
    """The type of a tensor before a transfer, and after it.

    Args:
        before, after: whether ranks may hold summands.
        world: the number of ranks that there are.
    """
    shape, source = draw(shapes), draw(places("m", world))
    target = draw(st.just(source) | places("n", world))
    return (
        TensorType(DType.F32, shape, source, draw(layouts(shape, source, before))),
        TensorType(DType.F32, shape, target, draw(layouts(shape, target, after))),
    )


def is_valid(types: Types) -> bool:
    """True if a program may have the transfer, and a layout has to do with it.

    What is cut does not become a sum where the cut is.
    """
    source, target = types
    if source.layout is None or not summands(target):
        return source.layout is not None or target.layout is not None
    cut = {axis for dim in source.layout.cuts for axis in dim.axes}
    return cut.isdisjoint(summands(target)) if source.place == target.place else not cut


def as_module(types: Types, phase: Phase = Phase.PLACED, world: int = WORLD) -> Module:
    """A step that transfers its input, and calls a function with the result and the rank."""
    source, target = types
    module = Module("step", phase, world)
    for place in (source.place, target.place):
        if isinstance(place, Mesh):
            module.meshes[place.name] = place
    number = TensorType(DType.I64, ())
    taken = (replace(target, place=None), number)
    module.functions["take"] = Function(
        "take", taken, (UnitType(),), kind=FunctionKind.OPAQUE, effect=Effect.WRITE
    )
    x, y = Value("x", source), Value("y", target)
    rank = Value("rank", replace(number, place=target.place))
    done = Value("done", UnitType(target.place))
    ops = [
        Transfer((x,), (y,)),
        Call((y, rank), (done,), fn=Symbol("take")),
        Return((), (), at=Place.of(0)),
    ]
    module.programs.append(Program("step", [x, rank], ops))
    return module


def inputs_of(types: Types, held: Mapping[int, Any], rank: int) -> list[Any]:
    """The values that a rank is given as inputs of the step."""
    source, target = types
    found = []
    if rank in ranks_of(source):
        found.append(held[rank][selected(source.region(rank))])
    if rank in ranks_of(target):
        found.append(np.asarray(rank))
    return found


def ranks_of(type_: TensorType) -> tuple[int, ...]:
    """The ranks of a type's place."""
    assert type_.place is not None
    return type_.place.ranks


def summands(type_: TensorType) -> tuple[str, ...]:
    """The axes along which ranks hold summands."""
    return type_.layout.summands if type_.layout is not None else ()


def reduction(type_: TensorType) -> ReduceOp:
    """The function that combines the summands of a type."""
    return type_.layout.reduce if type_.layout is not None else ReduceOp.SUM


def selected(region: Region) -> tuple[Any, ...]:
    """An index of the elements of a logical array that are in a region."""
    return np.ix_(*([i for a, b in dim for i in range(a, b)] for dim in region))


def initial(type_: TensorType, seed: int, whole_numbers: bool = False) -> dict[int, Any]:
    """The values of each rank: an array of the logical shape, NaN where it holds nothing.

    Ranks that differ along no axis of summands hold parts of one tensor.
    """
    assert type_.place is not None
    rng, found, tensors = np.random.default_rng(seed), {}, {}
    for rank, position in type_.place.positions.items():
        key = tuple(position[axis] for axis in summands(type_))
        if key not in tensors:
            values = rng.standard_normal(type_.shape) * 10.0 ** rng.integers(-6, 6, type_.shape)
            if whole_numbers:
                values = rng.integers(-5, 6, type_.shape)
            tensors[key] = np.asarray(values, np.float32)
        found[rank] = restricted(tensors[key], type_.region(rank))
    return found


def restricted(array: Any, region: Region | None) -> Any:
    """An array, and NaN outside of a region."""
    found = np.full_like(array, np.nan)
    if region is not None:
        found[selected(region)] = array[selected(region)]
    return found


def messages_of(plan: ReshardingPlan) -> tuple[RegionMessage, ...]:
    """The messages of all rounds."""
    steps = [step for step in plan.rounds if isinstance(step, RegionMessages)]
    return tuple(message for step in steps for message in step.messages)


def logical(type_: TensorType, held: Mapping[int, Any]) -> Any:
    """The tensor that ranks hold: their summands are combined in the order of the place."""
    assert type_.place is not None
    found = np.full(type_.shape, np.nan, np.float32)
    for rank in type_.place.ranks:
        fibre = type_.place.fibre(rank, summands(type_))
        index = selected(type_.region(rank))
        total = held[fibre[0]][index]
        for other in fibre[1:]:
            total = COMBINE[reduction(type_)](total, held[other][index])
        found[index] = total
    return found


class Interpreter:
    """Runs a plan on arrays of the logical shape, in which NaN stands where a rank holds nothing.

    Attributes:
        held: what each rank holds.
        received: elements that each rank has received from others.
    """

    def __init__(self, plan: ReshardingPlan, held: Mapping[int, Any], neutral: int = 0) -> None:
        self.held = dict(held)
        self.received: Counter[int] = Counter()
        self._combine = COMBINE[plan.reduce]
        (self._shape,) = {array.shape for array in held.values()}
        for step in plan.rounds:
            if isinstance(step, MoveRound):
                after = self._move(step)
            elif isinstance(step, CombineRound):
                after = self._add(step)
            elif isinstance(step, GatherRound):
                after = self._gather(step)
            else:
                after = self._reduce(step)
            for rank, region in step.after.items():
                self.held[rank] = restricted(after.get(rank, self._nothing()), region)
                if region is not None:
                    self.part(rank, region)
        for rank in plan.neutral:
            self.held[rank] = np.full(self._shape, neutral, np.float32)

    def _nothing(self) -> Any:
        return np.full(self._shape, np.nan, np.float32)

    def part(self, rank: int, region: Region) -> Any:
        """A part of what a rank holds, which is all there."""
        part = self.held[rank][selected(region)]
        assert not np.isnan(part).any(), f"rank {rank} does not hold {region}"
        return part

    def _move(self, step: MoveRound) -> dict[int, Any]:
        after = {
            rank: restricted(self.held.get(rank, self._nothing()), region)
            for rank, region in step.after.items()
        }
        for message in step.messages:
            index = selected(message.region)
            assert np.isnan(after[message.target][index]).all(), "it is held, or sent twice"
            after[message.target][index] = self.part(message.source, message.region)
            self.received[message.target] += after[message.target][index].size
        return after

    def _add(self, step: CombineRound) -> dict[int, Any]:
        sent = {(m.source, m.target): m.region for m in step.messages}
        after = {}
        members = [(rank, ranks) for ranks in step.groups for rank in ranks]
        for rank, group in members:
            region = step.after[rank]
            if region is None:
                continue
            others = [other for other in group if other != rank]
            parts = {rank: self.part(rank, region)}
            for other in others if parts[rank].size else ():
                assert sent.pop((other, rank)) == region
                parts[other] = self.part(other, region)
                self.received[rank] += parts[other].size
            after[rank] = self._nothing()
            after[rank][selected(region)] = self._total([parts[r] for r in group if r in parts])
        assert not sent
        return after

    def _total(self, parts: list[Any]) -> Any:
        return list(itertools.accumulate(parts, self._combine))[-1]

    def _reduce(self, step: ReduceRound) -> dict[int, Any]:
        after: dict[int, Any] = {}
        for fibre in step.fibres:
            index = selected(fibre.region)
            total = self._nothing()
            total[index] = self._total([self.part(rank, fibre.region) for rank in fibre.ranks])
            count = len(fibre.ranks)
            for rank, piece in zip(fibre.ranks, fibre.pieces, strict=True):
                after.setdefault(rank, self._nothing())[selected(piece)] = total[selected(piece)]
                doubled = 2 if fibre.dim is None else 1
                self.received[rank] += doubled * total[index].size * (count - 1) // count
        return after

    def _gather(self, step: GatherRound) -> dict[int, Any]:
        after = {}
        for fibre in step.fibres:
            assert len({part.size for part in self._pieces(fibre)}) == 1, "pieces are equal"
            for rank, own in zip(fibre.ranks, fibre.pieces, strict=True):
                after[rank] = self._nothing()
                for piece, part in zip(fibre.pieces, self._pieces(fibre), strict=True):
                    after[rank][selected(piece)] = part
                    self.received[rank] += part.size if piece != own else 0
        return after

    def _pieces(self, fibre: Any) -> list[Any]:
        return [
            self.part(rank, piece) for rank, piece in zip(fibre.ranks, fibre.pieces, strict=True)
        ]


def check(types: Types, held: Mapping[int, Any], found: Mapping[int, Any]) -> None:
    """Some ranks hold after a transfer the values that they are to hold, to the bit.

    Args:
        held: of each rank before, as `initial` makes it.
        found: the parts of these ranks; of summands, those of all ranks.
    """
    source, target = types
    whole = logical(source, held)
    if not summands(target):
        for rank, value in found.items():
            np.testing.assert_array_equal(value, whole[selected(target.region(rank))])
        return
    after = {rank: np.full(target.shape, np.nan, np.float32) for rank in found}
    for rank, value in found.items():
        after[rank][selected(target.region(rank))] = value
    np.testing.assert_array_equal(logical(target, after), whole)
