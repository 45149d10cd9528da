"""Replace transfers that change a layout by messages and collectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...ir.attributes import Symbol
from ...ir.layout import Region, overlap, shape_of, share, volume, whole, within
from ...ir.ops import (
    AllGather,
    AllGatherRows,
    AllReduce,
    Assemble,
    Call,
    Collective,
    Constant,
    Op,
    ReduceScatter,
    ReduceScatterRows,
    Slice,
    Transfer,
    Value,
    builtins,
)
from ...ir.ops.clone import copy_op
from ...ir.ops.module import Module
from ...ir.ops.names import Names
from ...ir.phases import Phase
from ...ir.types import DType, Mesh, Place, TensorType
from ..base import Pass
from .resharding import plan
from .resharding_plan import (
    NEUTRAL,
    CombineRound,
    Fibre,
    GatherRound,
    MoveRound,
    ReduceRound,
    RegionMessage,
    ReshardingPlan,
)
from .routed_fibres import RoutedFibres


@dataclass(frozen=True)
class LowerTransfers(Pass):
    """Replace transfers of laid-out tensors by messages and collectives between single ranks.

    `resharding.py` plans them, so that each rank receives the parts that it needs and lacks, once.
    Slices cut the parts to send, and an `assemble` makes the result. The ops have the microbatch
    and the transport of the transfer. Other transfers stay. An exception are copies that go from
    several ranks to several others, at a mesh on either side: there the ranks share the sending.

    Before::

        mesh @m {tp = 2, ranks = {0..1}}
        %y = transfer(%x) {mb = 0} : f32[8]@2        // %x : f32[8/tp]@m

    After::

        %x.part = slice(%x) {mb = 0, region = [0:4]} : f32[4]@0
        %x.at2 = transfer(%x.part) {mb = 0} : f32[4]@2
        %x.part.1 = slice(%x) {mb = 0, region = [4:8]} : f32[4]@1
        %x.at2.1 = transfer(%x.part.1) {mb = 0} : f32[4]@2
        %y = assemble(%x.at2, %x.at2.1) {mb = 0, regions = {[0:4], [4:8]}} : f32[8]@2

    Before::

        %y = transfer(%x) : f32[8]@m                 // %x : f32[8|+tp]@m

    After::

        %x.part = slice(%x) {region = [0:8]} : f32[8]@0
        %x.part.1 = slice(%x) {region = [0:8]} : f32[8]@1
        %x.reduced = all_reduce(%x.part, %x.part.1) {group = {0..1}, op = sum} : f32[8]@{0..1}
        %y = assemble(%x.reduced) {regions = {[0:8]}} : f32[8]@m
    """

    name: ClassVar[str] = "lower-transfers"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.PLACED,)

    def run(self, module: Module) -> bool:
        program = module.program
        if not any(_is_laid_out(op) for op in program.ops if type(op) is Transfer):
            return False
        names, ops = Names.of(program), list[Op]()
        renamed: dict[Value, Value] = {}
        # Each microbatch has the same transfers.
        recipes: dict[tuple[object, ...], _Recipe] = {}
        for op in program.ops:
            if renamed:
                op.operands = tuple([renamed.get(value, value) for value in op.operands])
            if isinstance(op, Transfer) and _is_laid_out(op):
                types = *(v.type for v in (*op.operands, op.result)), op.experts, op.lead
                if types not in recipes:
                    recipes[types] = _Lowering(module, op).run()
                result = recipes[types].apply(op, names, ops)
                if result is not op.result:
                    renamed[op.result] = result
            else:
                ops.append(op)
        program.ops[:] = ops
        return True


def _is_laid_out(op: Transfer) -> bool:
    """True if layouts matter to a transfer."""
    operand_type, result_type = op.operands[0].type, op.result.type
    if not isinstance(operand_type, TensorType) or not isinstance(result_type, TensorType):
        return False
    if operand_type.layout is not None or result_type.layout is not None:
        return True
    source, target = operand_type.place, result_type.place
    if not isinstance(source, Mesh) and not isinstance(target, Mesh):
        return False
    assert source is not None, "a placed program says where values are"
    assert target is not None, "a placed program says where values are"
    return not (source.is_single or target.is_single or source.covers(target))


@dataclass(frozen=True, slots=True)
class _RegionAtRank:
    """A region of the logical tensor at a rank, and the value that contains it.

    Attributes:
        value: the value.
        has: the region of the whole value at this rank.
        region: the region of the part, within `has`.
    """

    value: Value
    has: Region
    region: Region


@dataclass(frozen=True, slots=True)
class _Recipe:
    """The ops that replace a transfer, to be copied for all transfers between the same types.

    Attributes:
        transfer: the transfer that the ops were made for.
        values: the new values with the suffixes of their names, in order.
        ops: the ops.
        result: the value that is the result.
    """

    transfer: Transfer
    values: tuple[tuple[Value, str], ...]
    ops: tuple[Op, ...]
    result: Value

    def apply(self, op: Transfer, names: Names, ops: list[Op]) -> Value:
        """Append the ops that replace another transfer; return the value that is its result."""
        source = op.operands[0]
        values = {self.transfer.result: op.result}
        for known, value in zip(self.transfer.operands, op.operands, strict=True):
            value.type = known.type  # equal types become one object, which has computed its regions
            values[known] = value
        op.result.type = self.transfer.result.type
        for value, suffix in self.values:
            values[value] = Value(names.fresh(f"{source.name}.{suffix}"), value.type)
        for template in self.ops:
            operands = tuple([values[value] for value in template.operands])
            new_op = copy_op(
                template, operands, tuple([values[value] for value in template.results])
            )
            new_op.loc, new_op.mb, new_op.task = op.loc, op.mb, op.task
            if isinstance(new_op, Transfer | Collective):
                new_op.via, new_op.why, new_op.traffic = op.via, op.why, op.traffic
            if isinstance(new_op, AllReduce):
                new_op.donated = op.donated
            ops.append(new_op)
        return values[self.result]


class _Lowering:
    """Makes the ops that replace a transfer."""

    def __init__(self, module: Module, op: Transfer) -> None:
        self._ops: list[Op] = []
        self._values: list[tuple[Value, str]] = []
        self._module = module
        self._op = op
        self._source = op.operands[0]
        source_type, target_type = self._source.type, op.result.type
        assert isinstance(source_type, TensorType), "only tensors have layouts"
        assert isinstance(target_type, TensorType), "a transfer keeps the element type"
        self._have, self._target = source_type, target_type
        self._slices: dict[tuple[Value, int, Region], Value] = {}
        self._held: dict[int, list[_RegionAtRank]] = {}
        self._routed = RoutedFibres.of(op)

    def run(self) -> _Recipe:
        """Make the ops."""
        result = self._source if self._have == self._target else self._lowered()
        return _Recipe(self._op, tuple(self._values), tuple(self._ops), result)

    def _lowered(self) -> Value:
        """Make the ops of the plan, and return the value that is the result."""
        assert self._have.place is not None, "a placed program says where values are"
        for rank in self._have.place.ranks:
            region = self._have.region(rank)
            self._held[rank] = _filled([_RegionAtRank(self._source, region, region)])
        resharding = plan(self._have, self._target)
        for step in resharding.rounds:
            if isinstance(step, ReduceRound):
                self._reduce(step, resharding)
            elif isinstance(step, CombineRound):
                self._combine(step, resharding)
            elif isinstance(step, GatherRound):
                # What has rows of some experts alone can be gathered no further.
                self._gather(step, step is resharding.rounds[-1])
            else:
                self._move(step)
        self._fill(resharding.neutral)
        return self._assembled()

    # Rounds

    def _move(self, step: MoveRound) -> None:
        received = self._send(step.messages)
        self._keep(step.after)
        for message, value in received:
            self._held[message.target].append(_RegionAtRank(value, message.region, message.region))

    def _gather(self, step: GatherRound, is_last: bool) -> None:
        routed = self._routed if is_last else None
        if routed is not None and routed.fit(step.fibres):
            self._gather_rows(step.fibres, routed)
            return
        for fibre in step.fibres:
            operands = self._operands(fibre, fibre.pieces)
            assert fibre.dim is not None, "a gather is along a dimension"
            place = Place(fibre.ranks)
            result = self._new("all", fibre.region, place)
            self._ops.append(AllGather(operands, (result,), group=place, dim=fibre.dim))
            if fibre.is_dense:
                self._hold(fibre.ranks, result, fibre.region)
            else:
                self._take_apart(result, fibre, fibre.dim)

    def _gather_rows(self, fibres: Iterable[Fibre], routed: RoutedFibres) -> None:
        for fibre in fibres:
            operands = (*self._operands(fibre, fibre.pieces), *self._ids(fibre, routed))
            results = [self._new("rows", fibre.region, Place.of(rank)) for rank in fibre.ranks]
            self._ops.append(
                AllGatherRows(
                    operands,
                    tuple(results),
                    group=Place(fibre.ranks),
                    experts=routed.experts_of(fibre),
                    lead=routed.lead,
                )
            )
            for rank, value in zip(fibre.ranks, results, strict=True):
                self._hold((rank,), value, fibre.region)

    def _ids(self, fibre: Fibre, routed: RoutedFibres) -> tuple[Value, ...]:
        """The ids of a fibre's rows at each of its ranks."""
        region, ids = routed.region(fibre), routed.ids
        held = [(_RegionAtRank(ids, routed.type.region(r), region), r) for r in fibre.ranks]
        return tuple([self._slice(part, rank, region) for part, rank in held])

    def _take_apart(self, gathered: Value, fibre: Fibre, dim: int) -> None:
        """Slice a gathered tensor, in which the pieces stand one behind the other, into them."""
        everything, count = whole(shape_of(fibre.region)), len(fibre.ranks)
        for rank in fibre.ranks:
            self._held[rank] = []
            for index, piece in enumerate(fibre.pieces):
                value = self._new("part", piece, Place.of(rank))
                region = share(everything, index, count, dim)
                self._ops.append(Slice((gathered,), (value,), region=region))
                self._held[rank].append(_RegionAtRank(value, piece, piece))

    def _reduce(self, step: ReduceRound, resharding: ReshardingPlan) -> None:
        held: dict[int, list[_RegionAtRank]] = {rank: [] for rank in step.after}
        routed = self._routed
        moves_rows = routed is not None and routed.fit(step.fibres)
        for fibre in step.fibres:
            operands = self._operands(fibre, (fibre.region,) * len(fibre.ranks))
            place = Place(fibre.ranks)
            collective: Collective
            if fibre.dim is None:
                results = (self._new("reduced", fibre.region, place),) * len(fibre.ranks)
                collective = AllReduce(operands, results[:1], group=place, op=resharding.reduce)
            else:
                pairs = zip(fibre.pieces, fibre.ranks, strict=True)
                results = tuple([self._new("reduced", p, Place.of(rank)) for p, rank in pairs])
                collective = ReduceScatter(
                    operands, results, group=place, op=resharding.reduce, dim=fibre.dim
                )
                if routed is not None and moves_rows:
                    collective = ReduceScatterRows(
                        (*operands, *self._ids(fibre, routed)),
                        results,
                        group=place,
                        experts=routed.experts_of(fibre),
                        lead=routed.lead,
                    )
            self._ops.append(collective)
            for rank, piece, value in zip(fibre.ranks, fibre.pieces, results, strict=True):
                held[rank].append(_RegionAtRank(value, piece, piece))
        self._held.update(held)

    def _combine(self, step: CombineRound, resharding: ReshardingPlan) -> None:
        received = {(m.source, m.target): value for m, value in self._send(step.messages)}
        held: dict[int, list[_RegionAtRank]] = {rank: [] for rank in step.after}
        members = [(rank, ranks) for ranks in step.groups for rank in ranks]
        for rank, group in members:
            region = step.after[rank]
            if region is None or not volume(region):
                continue
            first, *others = (
                self._part(rank, region) if member == rank else received[member, rank]
                for member in group
            )
            for summand in others:
                first = self._combined(first, summand, region, Place.of(rank), resharding)
            held[rank] = [_RegionAtRank(first, region, region)]
        self._held.update(held)

    def _combined(
        self, a: Value, b: Value, region: Region, place: Place, resharding: ReshardingPlan
    ) -> Value:
        result = self._new("reduced", region, place)
        type_ = TensorType(self._target.dtype, shape_of(region))
        function = builtins.combine(self._module, type_, resharding.reduce)
        self._ops.append(Call((a, b), (result,), fn=Symbol(function.name)))
        return result

    def _fill(self, ranks: Iterable[int]) -> None:
        """Let ranks hold neutral summands, which do not change the result."""
        for rank in ranks:
            assert self._target.layout is not None, "summands are laid out"
            region, fill = self._target.region(rank), NEUTRAL[self._target.layout.reduce]
            self._held[rank] = []
            if volume(region):
                value = self._new("neutral", region, Place.of(rank))
                number = float(fill) if self._target.dtype.is_differentiable else fill
                self._ops.append(Constant((), (value,), fill=number))
                self._hold((rank,), value, region)

    def _assembled(self) -> Value:
        """The result, made from the parts that its ranks hold."""
        assert self._target.place is not None, "a placed program says where values are"
        parts: dict[Value, Region] = {}
        for rank in self._target.place.ranks:
            for part in self._held.get(rank, ()):
                is_all = part.value is not self._source and part.has == part.region
                value = part.value if is_all else self._slice(part, rank, part.region)
                parts[value] = part.region
        if [value.type for value in parts] == [self._target]:
            return next(iter(parts))
        regions = tuple(parts.values())
        self._ops.append(Assemble(tuple(parts), (self._op.result,), regions=regions))
        return self._op.result

    # Parts

    def _send(self, messages: Iterable[RegionMessage]) -> list[tuple[RegionMessage, Value]]:
        sent = []
        for message in messages:
            part = self._part(message.source, message.region)
            target = Place.of(message.target)
            value = self._new(f"at{message.target}", message.region, target)
            self._ops.append(Transfer((part,), (value,)))
            sent.append((message, value))
        return sent

    def _operands(self, fibre: Fibre, regions: Iterable[Region]) -> tuple[Value, ...]:
        pairs = zip(fibre.ranks, regions, strict=True)
        return tuple([self._part(rank, region) for rank, region in pairs])

    def _keep(self, after: Mapping[int, Region | None]) -> None:
        """Restrict the parts that ranks hold to these regions."""
        for rank, region in after.items():
            held = self._held.get(rank, []) if region is not None else []
            self._held[rank] = _filled(_restricted(held, region or ()))

    def _hold(self, ranks: Iterable[int], value: Value, region: Region) -> None:
        for rank in ranks:
            self._held[rank] = [_RegionAtRank(value, region, region)]

    def _part(self, rank: int, region: Region) -> Value:
        """A value at one rank with exactly this region of the logical tensor."""
        parts = _filled(_restricted(self._held[rank], region))
        if len(parts) == 1:
            return self._slice(parts[0], rank, region)
        values = tuple([self._slice(part, rank, part.region) for part in parts])
        result = self._new(f"at{rank}", region, Place.of(rank))
        regions = tuple([within(part.region, region) for part in parts])
        self._ops.append(Assemble(values, (result,), regions=regions))
        return result

    def _slice(self, part: _RegionAtRank, rank: int, region: Region) -> Value:
        value, type_ = part.value, part.value.type
        assert isinstance(type_, TensorType), "parts are tensors"
        if type_ == TensorType(type_.dtype, shape_of(region), Place.of(rank)):
            return value
        key = value, rank, region
        if key not in self._slices:
            self._slices[key] = self._new("part", region, Place.of(rank), type_.dtype)
            taken = region if value in self._op.operands else within(region, part.has)
            self._ops.append(Slice((value,), (self._slices[key],), region=taken))
        return self._slices[key]

    def _new(self, suffix: str, region: Region, place: Place, dtype: DType | None = None) -> Value:
        type_ = TensorType(dtype or self._target.dtype, shape_of(region), place)
        value = Value(suffix, type_)
        self._values.append((value, suffix))
        return value


def _restricted(parts: Iterable[_RegionAtRank], region: Region) -> Iterator[_RegionAtRank]:
    return (_RegionAtRank(part.value, part.has, overlap(part.region, region)) for part in parts)


def _filled(parts: Iterable[_RegionAtRank]) -> list[_RegionAtRank]:
    """The parts that have elements."""
    return [part for part in parts if volume(part.region)]
