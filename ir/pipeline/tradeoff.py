"""The bytes that a call saves for its backward, against the work of computing values again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SavingPoint:
    """One choice of the values that a forward saves for its backward.

    Attributes:
        saved: the bytes that the forward saves, of tensors of the whole call.
        again: the work that the backward does again, in the unit of `Tradeoff`.
    """

    saved: int
    again: int


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """The choices of the values that a forward saves for its backward.

    Work is counted in floating-point operations; a byte that an operator reads or writes counts as
    some.

    Attributes:
        points: the choices, the most bytes first; each has fewer bytes and more work than the one
            before. The first is the choice of a step that is compiled without a limit.
        work: the work of the forward.
    """

    points: tuple[SavingPoint, ...]
    work: int

    @property
    def most(self) -> int:
        """The bytes that are saved without a limit."""
        return self.points[0].saved

    @property
    def least(self) -> int:
        """The fewest bytes that can be saved."""
        return self.points[-1].saved

    def share_within(self, limit: int) -> float:
        """The share of the forward's work that is done again within a limit."""
        return self.within(limit).again / max(1, self.work)

    def within(self, limit: int) -> SavingPoint:
        """The choice with the least work of those that save at most `limit` bytes, or the last."""
        return next((point for point in self.points if point.saved <= limit), self.points[-1])
