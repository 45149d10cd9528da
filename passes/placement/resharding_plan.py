"""The plan of a transfer: rounds of messages and collectives, and the regions after each.

All regions are in indices of the logical tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ...ir.attributes import ReduceOp
from ...ir.layout import Region, shape_of, share, volume

NEUTRAL: Mapping[ReduceOp, int] = {ReduceOp.SUM: 0, ReduceOp.PROD: 1}
"""The neutral element of each reduction; the others need none, as equal copies change nothing."""

Held: TypeAlias = Mapping[int, Region | None]
"""The region that each rank holds; None if it holds nothing."""


@dataclass(frozen=True, slots=True)
class RegionMessage:
    """A region that one rank sends to another."""

    source: int
    target: int
    region: Region


@dataclass(frozen=True, slots=True)
class Fibre:
    """The ranks of a collective, and the region that it gathers or reduces.

    Attributes:
        ranks: the ranks, in the order of the group.
        region: the region.
        pieces: the piece of the region that each rank has before a gather, or after a reduction.
        dim: the dimension that is cut into the pieces; None: each rank has the whole region.
    """

    ranks: tuple[int, ...]
    region: Region
    pieces: tuple[Region, ...]
    dim: int | None = None

    @staticmethod
    def shared(ranks: tuple[int, ...], region: Region, dim: int) -> Fibre:
        """The fibre whose ranks have equal shares of a region, one behind the other along `dim`."""
        count = len(ranks)
        return Fibre(ranks, region, tuple(share(region, k, count, dim) for k in range(count)), dim)

    @property
    def is_even(self) -> bool:
        """True if the pieces have one shape, as a collective needs."""
        return len({shape_of(piece) for piece in self.pieces}) == 1

    @property
    def is_dense(self) -> bool:
        """True if the region consists of the pieces in order, one behind the other."""
        return self.dim is not None and self == Fibre.shared(self.ranks, self.region, self.dim)


@dataclass(frozen=True, slots=True)
class ReduceRound:
    """Collectives that combine summands: reduce-scatters of fibres with `dim`, or all-reduces.

    Attributes:
        fibres: the collectives.
        after: the regions that ranks hold after the round.
    """

    fibres: tuple[Fibre, ...]
    after: Held

    def received(self) -> Counter[int]:
        """The number of elements that each rank receives from others."""
        elements: Counter[int] = Counter()
        for fibre in self.fibres:
            for rank, piece in zip(fibre.ranks, fibre.pieces, strict=True):
                count = len(fibre.ranks)
                if fibre.dim is None:  # a reduce-scatter and an all-gather
                    elements[rank] += 2 * volume(piece) * (count - 1) // count
                else:
                    elements[rank] += volume(piece) * (count - 1)
        return elements


@dataclass(frozen=True, slots=True)
class RegionMessages:
    """Messages of regions between ranks.

    Attributes:
        messages: the messages.
        after: the regions that ranks hold after the round.
    """

    messages: tuple[RegionMessage, ...]
    after: Held

    def received(self) -> Counter[int]:
        """The number of elements that each rank receives from others."""
        elements: Counter[int] = Counter()
        for message in self.messages:
            elements[message.target] += volume(message.region)
        return elements


@dataclass(frozen=True, slots=True)
class CombineRound(RegionMessages):
    """Messages of summands; each rank combines its own with the received ones, in group order.

    Attributes:
        groups: the groups of ranks whose summands belong together, in order.
    """

    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class MoveRound(RegionMessages):
    """Messages of parts, which ranks put together with parts that they hold."""


@dataclass(frozen=True, slots=True)
class GatherRound:
    """All-gathers: each rank gives its piece of a region, and gets the whole region.

    Attributes:
        fibres: the collectives.
        after: the regions that ranks hold after the round.
    """

    fibres: tuple[Fibre, ...]
    after: Held

    def received(self) -> Counter[int]:
        """The number of elements that each rank receives from others."""
        elements: Counter[int] = Counter()
        for fibre in self.fibres:
            for rank, piece in zip(fibre.ranks, fibre.pieces, strict=True):
                elements[rank] += volume(fibre.region) - volume(piece)
        return elements


Round: TypeAlias = ReduceRound | CombineRound | MoveRound | GatherRound
"""A round of a plan. Ranks that are not in its `after` hold the same regions as before."""


@dataclass(frozen=True, slots=True)
class ReshardingPlan:
    """The rounds of a transfer that brings a tensor from one type to another.

    Attributes:
        rounds: the rounds in order. A round has at most one message between two ranks each way.
        neutral: the ranks whose summand of the result is neutral: zeros of a sum, ones of a
            product.
        reduce: the operation that combines summands.
    """

    rounds: tuple[Round, ...]
    neutral: tuple[int, ...] = ()
    reduce: ReduceOp = ReduceOp.SUM

    def received(self) -> Counter[int]:
        """The number of elements that each rank receives from others, in all rounds."""
        return sum((step.received() for step in self.rounds), Counter[int]())
