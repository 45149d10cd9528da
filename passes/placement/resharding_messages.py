"""Plan the messages of a round of a transfer: which rank sends which region to which rank."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from itertools import pairwise

from ...ir.layout import Region, entries, overlap, shape_of, volume
from .resharding_plan import Held, RegionMessage


class RegionHolders:
    """The ranks that hold each region of a tensor; two regions are equal or disjoint.

    Regions are indexed by their intervals in the dimension in which most regions differ. So only
    regions that overlap in that dimension are compared.
    """

    def __init__(self, held: Held) -> None:
        self._held = held
        self._ranks: dict[Region, list[int]] = {}
        for rank, region in held.items():
            if region is not None and volume(region):
                self._ranks.setdefault(region, []).append(rank)
        self._regions = list(self._ranks)
        self._dim = _most_cut(self._regions)
        self._bounds: list[int] = []
        self._segments: list[list[int]] = []
        if self._dim is not None:
            self._index(self._dim)

    def _index(self, dim: int) -> None:
        """Note the regions that contain each segment between neighbouring bounds."""
        intervals = {interval for region in self._regions for interval in region[dim]}
        self._bounds = sorted({bound for interval in intervals for bound in interval})
        self._segments = [[] for _ in self._bounds]
        for number, region in enumerate(self._regions):
            for start, stop in region[dim]:
                first, last = bisect_left(self._bounds, start), bisect_left(self._bounds, stop)
                for segment in self._segments[first:last]:
                    segment.append(number)

    def meeting(self, wanted: Region) -> Iterator[tuple[Region, Region]]:
        """The regions that overlap with the region `wanted`, each with the overlap."""
        for number in self._candidates(wanted):
            region = self._regions[number]
            common = overlap(region, wanted)
            if volume(common):
                yield region, common

    def _candidates(self, region: Region) -> Mapping[int, None]:
        if self._dim is None:
            return dict.fromkeys(range(len(self._regions)))
        numbers: dict[int, None] = {}
        for start, stop in region[self._dim]:
            first = max(bisect_right(self._bounds, start) - 1, 0)
            for segment in self._segments[first : bisect_left(self._bounds, stop)]:
                numbers.update(dict.fromkeys(segment))
        return numbers

    def messages(self, needs: Mapping[int, Region]) -> tuple[RegionMessage, ...]:
        """The messages that bring each rank the elements that it needs and lacks, once."""
        asked: dict[Region, list[tuple[int, Region]]] = {}
        for rank, need in needs.items():
            own = self._held.get(rank)
            for region, common in self.meeting(need):
                if region != own:
                    asked.setdefault(region, []).append((rank, common))
        return tuple(
            message
            for region, boxes in asked.items()
            for message in _divide(self._ranks[region], boxes)
        )


def _most_cut(regions: list[Region]) -> int | None:
    """The dimension in which most regions differ; None for scalars."""
    dims = range(len(regions[0])) if regions else range(0)
    counts = [len({region[dim] for region in regions}) for dim in dims]
    return max(dims, key=counts.__getitem__, default=None)


def _divide(senders: list[int], boxes: list[tuple[int, Region]]) -> Iterator[RegionMessage]:
    """Let ranks that hold copies send equal shares of the boxes that other ranks need.

    The boxes stand in a row, which is cut into as many equal parts as there are senders. So n equal
    boxes and m senders make m + n - gcd(m, n) messages. A cut is rounded to whole entries of its
    box along one dimension.

    Args:
        senders: the ranks that hold copies.
        boxes: pairs of a target rank and the region that it needs.
    """
    count, total = len(senders), sum(volume(box) for _, box in boxes)
    start = 0
    for target, box in boxes:
        size = volume(box)
        first, last = start * count // total, (start + size - 1) * count // total
        # The distance of each cut from the start of the box, in elements times `count`.
        cuts = [index * total - start * count for index in range(first + 1, last + 1)]
        for index, part in enumerate(_cut(box, cuts, size * count), first):
            if part is not None:
                yield RegionMessage(senders[index], target, part)
        start += size


def _cut(box: Region, cuts: list[int], whole: int) -> list[Region | None]:
    """The parts of a box between cuts, whose positions are fractions of `whole`."""
    lengths = shape_of(box)
    if not lengths or not cuts:
        return [box] + [None] * len(cuts)
    dims = range(len(lengths))
    longest = max(dims, key=lengths.__getitem__)
    dim = next((d for d in dims if all(cut * lengths[d] % whole == 0 for cut in cuts)), longest)
    # Rounded up, so that a box that cannot be cut goes whole, from the first of its senders.
    bounds = [0, *(-(-cut * lengths[dim] // whole) for cut in cuts), lengths[dim]]
    return [entries(box, dim, (a, b)) if a < b else None for a, b in pairwise(bounds)]
