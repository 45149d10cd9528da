"""Plan the reductions of a transfer: which ranks combine which summands, and by which round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from ...ir.layout import Region, length, merge, overlap, share, volume
from .resharding_plan import CombineRound, Fibre, ReduceRound, RegionMessage, Round


def reduced(
    held: Mapping[int, Region], groups: Sequence[tuple[int, ...]], needs: Mapping[int, Region]
) -> list[Round]:
    """The rounds that combine all summands; afterwards no rank holds a summand.

    If the groups need the result themselves, each rank gets the region that it needs; otherwise
    each rank gets a share.

    Args:
        held: the region that each rank has a summand of.
        groups: the groups of ranks whose summands belong together, in the order of the sum.
        needs: the region that each rank needs.
    """
    if held.keys() == needs.keys():
        reductions = [_reduced_to_needs(group, held[group[0]], needs) for group in groups]
        if None not in reductions:
            return _combined([pair for pair in reductions if pair is not None])
    alike: dict[Region, list[tuple[int, ...]]] = {}
    for group in groups:
        alike.setdefault(held[group[0]], []).append(group)
    preferred = cut_dims(needs.values())
    return _combined(
        [
            pair
            for region, copies in alike.items()
            for pair in _reduced_to_shares(copies, region, preferred)
        ]
    )


_Reduction = tuple[tuple[int, ...], tuple[Fibre, ...], tuple[Region | None, ...]]
"""A group, the collectives that reduce its summands, if any, and the region of each rank then."""

_MOST_BLOCKS = 4
"""The most blocks of a dimension that are reduced by a reduce-scatter each, and not by messages."""


def _combined(reductions: Sequence[_Reduction]) -> list[Round]:
    """A round of the collectives, and a round of messages for reductions without collectives."""
    fibres = tuple(fibre for _, group_fibres, _ in reductions for fibre in group_fibres)
    after: dict[int, Region | None] = {}
    rest: dict[int, Region | None] = {}
    groups, messages = [], []
    for group, group_fibres, pieces in reductions:
        (after if group_fibres else rest).update(zip(group, pieces, strict=True))
        if not group_fibres and any(piece is not None and volume(piece) for piece in pieces):
            groups.append(group)
            messages += [
                RegionMessage(sender, rank, piece)
                for rank, piece in zip(group, pieces, strict=True)
                if piece is not None and volume(piece)
                for sender in group
                if sender != rank
            ]
    rounds: list[Round] = []
    if fibres:
        rounds.append(ReduceRound(fibres, after))
    if rest:
        rounds.append(CombineRound(tuple(messages), rest, tuple(groups)))
    return rounds


def _reduced_to_needs(
    group: tuple[int, ...], region: Region, needs: Mapping[int, Region]
) -> _Reduction | None:
    """The reduction that gives each rank the region that it needs.

    None if the group lacks some of it, or if some elements would be combined twice.
    """
    group_needs = tuple(needs[rank] for rank in group)
    if any(overlap(need, region) != need for need in group_needs):
        return None
    filled = [need for need in group_needs if volume(need)]
    if not filled:
        return group, (), group_needs
    if len(filled) == len(group) and len(set(filled)) == 1:
        return group, (Fibre(group, filled[0], group_needs),), group_needs
    if len(set(filled)) < len(filled):
        return None
    return group, _scattered(group, group_needs), group_needs


def _scattered(group: tuple[int, ...], pieces: Sequence[Region]) -> tuple[Fibre, ...]:
    """The reduce-scatters that give ranks these pieces, one for each block of a dimension.

    There are none if pieces are uneven, or not in the order of the group.
    """
    dims = cut_dims(pieces)
    counts = {len(piece[dim]) for piece in pieces for dim in dims}
    if len(dims) != 1 or len(counts) != 1 or not counts <= set(range(1, _MOST_BLOCKS + 1)):
        return ()
    (dim,), (count,) = dims, counts
    fibres = []
    for block in range(count):
        intervals = [piece[dim][block] for piece in pieces]
        if any(before[1] > after[0] for before, after in pairwise(intervals)):
            return ()
        first = pieces[0]
        fibre = Fibre.shared(group, (*first[:dim], merge(intervals), *first[dim + 1 :]), dim)
        if [piece[dim] for piece in fibre.pieces] != [(interval,) for interval in intervals]:
            return ()
        fibres.append(fibre)
    return tuple(fibres) if all(fibre.is_even for fibre in fibres) else ()


def _reduced_to_shares(
    groups: Sequence[tuple[int, ...]], region: Region, preferred: Sequence[int]
) -> Iterator[_Reduction]:
    """The reductions of groups with copies of the same summands.

    Each group combines a share of the region if it divides evenly; otherwise the first combines all
    of it.
    """
    size, count = len(groups[0]), len(groups)
    dim = even_dim(region, size * count, preferred) if volume(region) else None
    if dim is not None:
        for index, group in enumerate(groups):
            fibre = Fibre.shared(group, share(region, index, count, dim), dim)
            yield group, (fibre,), fibre.pieces
        return
    first, *others = groups
    dim = even_dim(region, size, preferred) if volume(region) else None
    if dim is not None:
        fibre = Fibre.shared(first, region, dim)
        yield first, (fibre,), fibre.pieces
    elif region:
        yield first, (), tuple(share(region, index, size) for index in range(size))
    else:
        yield first, (), (region, *(None,) * (size - 1))
    for group in others:
        yield group, (), (None,) * size


def cut_dims(pieces: Iterable[Region]) -> list[int]:
    """The dimensions in which pieces differ."""
    columns = [set(column) for column in zip(*pieces, strict=True)]
    return [dim for dim, column in enumerate(columns) if len(column) > 1]


def even_dim(region: Region, count: int, preferred: Sequence[int]) -> int | None:
    """A dimension whose size is a multiple of `count`, preferred ones first; None without one."""
    return next(
        (dim for dim in (*preferred, *range(len(region))) if length(region[dim]) % count == 0),
        None,
    )
