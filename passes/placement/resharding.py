"""Plan transfers between layouts: which ranks reduce, send and gather which regions.

Without summands, each rank receives the elements that it needs and lacks, once. A tensor that is
cut into p pieces on some ranks, and into q on others, takes p + q - gcd(p, q) messages. Ranks that
hold copies send equal shares. Ranks that need copies get a share each, and gather the rest among
themselves. Summands are always combined in the order of their group, so that their sum has the same
bits, whichever ops combine them.

Sources: the intersection of index sets of Ramaswamy and Banerjee, "Automatic generation of
efficient array redistribution routines for distributed memory multicomputers" (1995); messages and
a local all-gather for copies, of Zhuang et al., "On optimizing the communication of model
parallelism" (2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...ir.attributes import ReduceOp
from ...ir.layout import Region, overlap, shape_of, volume
from ...ir.types import TensorType
from .resharding_messages import RegionHolders
from .resharding_plan import (
    NEUTRAL,
    Fibre,
    GatherRound,
    Held,
    MoveRound,
    RegionMessages,
    ReshardingPlan,
    Round,
)
from .resharding_sums import cut_dims, even_dim, reduced


def plan(source: TensorType, target: TensorType) -> ReshardingPlan:
    """Plan the transfer of a tensor to another type: at other ranks, or in another layout.

    Args:
        source: the type of the tensor; it may be copies, cut, or summands.
        target: the type of the result, with the same element type and logical shape. If copies
            become summands of a sum, the first rank along the axes of summands keeps its copy, and
            the others hold zeros; of a product, they hold ones. Of a maximum or minimum, each rank
            keeps its copy.

    Raises:
        ValueError: element types or shapes differ, or a type has no place.
    """
    if (source.dtype, source.shape) != (target.dtype, target.shape):
        raise ValueError(f"a transfer keeps element type and shape: {source} is to be {target}")
    if source.place is None or target.place is None:
        raise ValueError(f"a transfer is between places: {source} is to be {target}")
    if source == target:
        return ReshardingPlan(())
    rounds: list[Round] = []
    neutral: list[int] = []
    for part in _parts(source, target):
        part_rounds = list(part.rounds())
        if not part.groups:
            _check_bound(part, part_rounds)
        rounds += part_rounds
        neutral += part.neutral
    _check_messages(rounds)
    return ReshardingPlan(tuple(rounds), tuple(neutral), _summed(source)[1])


@dataclass(frozen=True, slots=True)
class _IndependentTransfer:
    """A transfer within a set of ranks that need nothing from other ranks.

    Attributes:
        held: the region that each rank holds, or has a summand of.
        groups: the groups of ranks whose summands belong together, in order; empty without
            summands.
        needs: the region that each rank needs.
        neutral: the ranks that get neutral summands.
        gathers: whether ranks that need copies may gather them.
    """

    held: dict[int, Region]
    groups: tuple[tuple[int, ...], ...]
    needs: dict[int, Region]
    neutral: tuple[int, ...]
    gathers: bool = True

    def rounds(self) -> Iterator[Round]:
        """The rounds of the plan."""
        held: Held = self.held
        if self.groups:
            for step in reduced(self.held, self.groups, self.needs):
                held = {**held, **step.after}
                yield step
        yield from _redistributed(held, self.needs, self.gathers)


def _parts(source: TensorType, target: TensorType) -> Iterator[_IndependentTransfer]:
    """The parts of a transfer: one in all or, for summands that stay, one for each term."""
    assert source.place is not None, "a plan is between places"
    assert target.place is not None, "a plan is between places"
    summands, _ = _summed(source)
    target_axes, reduce = _summed(target)
    kept_axes = _kept(source, target)
    held, needs = dict(source.regions()), dict(target.regions())
    groups = _fibres(source, [axis for axis in summands if axis not in kept_axes])
    neutral: list[int] = []
    if reduce in NEUTRAL:
        fibres = _fibres(target, [axis for axis in target_axes if axis not in kept_axes])
        neutral = [rank for fibre in fibres for rank in fibre[1:]]
    for rank in neutral:
        del needs[rank]
    if not kept_axes:
        yield _IndependentTransfer(held, tuple(groups), needs, tuple(neutral))
        return
    others = [axis for axis, _ in source.place.axes if axis not in kept_axes]
    for ranks in map(set, _fibres(source, others) or [(rank,) for rank in held]):
        yield _IndependentTransfer(
            {rank: held[rank] for rank in held if rank in ranks},
            tuple(group for group in groups if group[0] in ranks),
            {rank: needs[rank] for rank in needs if rank in ranks},
            tuple(rank for rank in neutral if rank in ranks),
            # Summands are only put together by the op that makes the result.
            gathers=False,
        )


def _summed(type_: TensorType) -> tuple[tuple[str, ...], ReduceOp]:
    if type_.layout is None:
        return (), ReduceOp.SUM
    return type_.layout.summands, type_.layout.reduce


def _kept(source: TensorType, target: TensorType) -> frozenset[str]:
    """The axes along which there are summands before and after, if the mesh is the same."""
    assert source.place is not None, "a plan is between places"
    assert target.place is not None, "a plan is between places"
    same = (source.place.ranks, source.place.axes) == (target.place.ranks, target.place.axes)
    (before, one), (after, other) = _summed(source), _summed(target)
    return frozenset(before).intersection(after) if same and one is other else frozenset()


def _fibres(type_: TensorType, axes: Sequence[str]) -> list[tuple[int, ...]]:
    """The groups of ranks that differ along `axes` only, in order; empty if these have size 1."""
    assert type_.place is not None, "a plan is between places"
    sizes = dict(type_.place.axes)
    if all(sizes[axis] == 1 for axis in axes):
        return []
    fixed = [axis for axis in sizes if axis not in axes]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, position in type_.place.positions.items():
        groups.setdefault(tuple(position[axis][0] for axis in fixed), []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


# Messages and gathers


def _redistributed(held: Held, needs: Mapping[int, Region], gathers: bool) -> Iterator[Round]:
    """Bring regions to the ranks that need them; ranks that need one region share and gather it."""
    if all(held.get(rank) == need for rank, need in needs.items()):
        return
    holders = RegionHolders(held)
    alike: dict[Region, list[int]] = {}
    for rank, need in needs.items():
        alike.setdefault(need, []).append(rank)
    stages: dict[int, list[Fibre]] = {}
    for region, ranks in alike.items() if gathers else ():
        own = {rank: _common(held.get(rank), region) for rank in ranks}
        having = {rank: piece for rank, piece in own.items() if piece is not None}
        lacking = [rank for rank in ranks if own[rank] is None]
        for fibre_stages in (_complements(region, having), _shared(region, lacking, holders)):
            for stage, fibres in enumerate(fibre_stages):
                stages.setdefault(stage, []).extend(fibres)
    first = dict(needs)
    for fibre in stages.get(0, ()):
        first.update(zip(fibre.ranks, fibre.pieces, strict=True))
    yield MoveRound(holders.messages(first), first)
    for fibres in stages.values():
        yield from _gathered(fibres)


def _common(held: Region | None, region: Region) -> Region | None:
    common = None if held is None else overlap(held, region)
    return common if common is not None and volume(common) else None


def _gathered(fibres: Sequence[Fibre]) -> Iterator[Round]:
    """The gathers of fibres: collectives if pieces are of one shape, and otherwise messages."""
    even = [fibre for fibre in fibres if fibre.is_even]
    if even:
        yield GatherRound(tuple(even), _all_of(even))
    uneven = [fibre for fibre in fibres if not fibre.is_even]
    if uneven:
        messages = [
            message
            for fibre in uneven
            for message in RegionHolders(
                dict(zip(fibre.ranks, fibre.pieces, strict=True))
            ).messages(dict.fromkeys(fibre.ranks, fibre.region))
        ]
        yield MoveRound(tuple(messages), _all_of(uneven))


def _all_of(fibres: Sequence[Fibre]) -> dict[int, Region]:
    return {rank: fibre.region for fibre in fibres for rank in fibre.ranks}


def _complements(region: Region, own: Mapping[int, Region]) -> list[list[Fibre]]:
    """The all-gathers, one after the other, among ranks that hold equal pieces of a region.

    Each is along one dimension, beginning with the last dimension that is cut. There are none if
    pieces are uneven, or if one piece has more copies than another.
    """
    dims = cut_dims(set(own.values()))
    if not dims:
        return []
    dim = dims[-1]
    alike: dict[Region, dict[Region, list[int]]] = {}
    for rank, piece in own.items():
        wider = (*piece[:dim], region[dim], *piece[dim + 1 :])
        alike.setdefault(wider, {}).setdefault(piece, []).append(rank)
    fibres = [fibre for wider, holders in alike.items() for fibre in _gathers(wider, holders, dim)]
    gathered = _all_of(fibres)
    if gathered.keys() != own.keys():
        return []
    if set(gathered.values()) == {region}:
        return [fibres]
    later = _complements(region, gathered)
    return [fibres, *later] if later else []


def _gathers(region: Region, holders: Mapping[Region, list[int]], dim: int) -> list[Fibre]:
    """The fibres that gather a region's pieces along a dimension, one for each copy; or none."""
    pieces = tuple(sorted(holders, key=lambda piece: piece[dim]))
    if sum(map(volume, pieces)) != volume(region):
        return []
    if len({len(ranks) for ranks in holders.values()}) != 1:
        return []
    groups = zip(*(holders[piece] for piece in pieces), strict=True)
    fibres = [Fibre(group, region, pieces, dim) for group in groups]
    return fibres if fibres[0].is_even else []


def _shared(region: Region, ranks: Sequence[int], holders: RegionHolders) -> list[list[Fibre]]:
    """The fibre of ranks without any part of a region, which get a share and gather the rest."""
    count = len(ranks)
    if count < 2 or not volume(region):
        return []
    preferred = cut_dims(common for _, common in holders.meeting(region))
    dim = even_dim(region, count, preferred)
    if dim is None:
        sizes = shape_of(region)
        dim = max(range(len(sizes)), key=sizes.__getitem__, default=None)
        if dim is None or sizes[dim] < count:
            return []
    return [[Fibre.shared(tuple(ranks), region, dim)]]


# Checks


def _check_bound(part: _IndependentTransfer, rounds: Sequence[Round]) -> None:
    """Assert that each rank receives exactly the elements that it needs and lacks."""
    received = ReshardingPlan(tuple(rounds)).received()
    for rank, need in part.needs.items():
        own = part.held.get(rank)
        missing = volume(need) - (volume(overlap(need, own)) if own is not None else 0)
        assert received[rank] == missing, f"rank {rank}: {received[rank]} of {missing} elements"
    strangers = received.keys() - part.needs.keys()
    assert not strangers, f"ranks {sorted(strangers)} receive what they do not need"


def _check_messages(rounds: Sequence[Round]) -> None:
    """Assert that no two messages of a round have the same source and the same target."""
    for step in rounds:
        if isinstance(step, RegionMessages):
            ends = {(message.source, message.target) for message in step.messages}
            assert len(ends) == len(step.messages), "two messages of a round have the same ends"
