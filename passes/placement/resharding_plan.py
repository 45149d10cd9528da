"""The plan of a transfer: rounds of messages and collectives, and what ranks hold after each.

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
"""The neutral element of each reduction. Equal copies change nothing in the others."""

Held: TypeAlias = Mapping[int, Region | None]
"""The region that each rank holds; None where it holds nothing."""


@dataclass(frozen=True, slots=True)
class Message:
    """A region that one rank sends to another."""

    source: int
    target: int
    region: Region


@dataclass(frozen=True, slots=True)
class Fibre:
    """The ranks of a collective, in its order, and the region that it is about.

    Attributes:
        pieces: what each rank has of the region before a gather, or after a reduction.
        dim: the dimension along which they are pieces; None: each rank has all.
    """

    ranks: tuple[int, ...]
    region: Region
    pieces: tuple[Region, ...]
    dim: int | None = None

    @staticmethod
    def shared(ranks: tuple[int, ...], region: Region, dim: int) -> Fibre:
        """Each rank has a share, one behind the other."""
        count = len(ranks)
        return Fibre(ranks, region, tuple(share(region, k, count, dim) for k in range(count)), dim)

    @property
    def is_even(self) -> bool:
        """True if the pieces are of one shape, as those of a collective are."""
        return len({shape_of(piece) for piece in self.pieces}) == 1

    @property
    def is_dense(self) -> bool:
        """True if the region is its pieces, one behind the other."""
        return self.dim is not None and self == Fibre.shared(self.ranks, self.region, self.dim)


@dataclass(frozen=True, slots=True)
class ReduceRound:
    """Collectives that combine summands: an all-reduce, or with a dimension a reduce-scatter."""

    fibres: tuple[Fibre, ...]
    after: Held

    def received(self) -> Counter[int]:
        """Elements that each rank receives from others."""
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
class PointToPoint:
    """Messages of regions between ranks; `after` is what ranks hold when all have come."""

    messages: tuple[Message, ...]
    after: Held

    def received(self) -> Counter[int]:
        """Elements that each rank receives from others."""
        elements: Counter[int] = Counter()
        for message in self.messages:
            elements[message.target] += volume(message.region)
        return elements


@dataclass(frozen=True, slots=True)
class CombineRound(PointToPoint):
    """Messages of summands. Each rank combines its own with those it gets, in the group's order.

    Attributes:
        groups: the ranks whose tensors are summands of one another, in order.
    """

    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class MoveRound(PointToPoint):
    """Messages of parts, which ranks put together with parts of what they hold."""


@dataclass(frozen=True, slots=True)
class GatherRound:
    """All-gathers: each rank gives its piece of a region and gets all of it."""

    fibres: tuple[Fibre, ...]
    after: Held

    def received(self) -> Counter[int]:
        """Elements that each rank receives from others."""
        elements: Counter[int] = Counter()
        for fibre in self.fibres:
            for rank, piece in zip(fibre.ranks, fibre.pieces, strict=True):
                elements[rank] += volume(fibre.region) - volume(piece)
        return elements


Round: TypeAlias = ReduceRound | CombineRound | MoveRound | GatherRound
"""`after` is what ranks hold when it is over; those that it does not name hold what they held."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The rounds of a transfer that brings a tensor from one type to another.

    Attributes:
        rounds: in order. Between two ranks there is at most one message of a round each way.
        neutral: the ranks whose summand of the result changes nothing: zeros of a sum, ones of a
            product.
        reduce: what combines summands.
    """

    rounds: tuple[Round, ...]
    neutral: tuple[int, ...] = ()
    reduce: ReduceOp = ReduceOp.SUM

    @property
    def messages(self) -> tuple[Message, ...]:
        """Those of all rounds."""
        return tuple(
            message
            for step in self.rounds
            if isinstance(step, PointToPoint)
            for message in step.messages
        )

    def received(self) -> Counter[int]:
        """Elements that each rank receives from others."""
        return sum((step.received() for step in self.rounds), Counter[int]())
