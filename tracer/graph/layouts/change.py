"""Classify changes of layout by the work that ranks have with them."""

from __future__ import annotations

import enum
import functools

from ....ir.layout import Layout, overlap
from ....ir.types import Place
from .cases import Shape


class Change(enum.Enum):
    """The work of ranks in a change of a tensor's layout.

    NONE: nothing. SLICE: each rank takes a part of its piece. REDUCE: summands are combined.
    GATHER: ranks get parts that they do not hold. RESHARD: ranks get parts, and drop others.
    """

    NONE = "none"
    SLICE = "slice"
    REDUCE = "reduce"
    GATHER = "gather"
    RESHARD = "reshard"

    @property
    def communicates(self) -> bool:
        """True if ranks exchange anything."""
        return self not in (Change.NONE, Change.SLICE)


ORDER = tuple(Change)
"""From the least work to the most."""

DEFAULT = frozenset({Change.NONE, Change.SLICE, Change.REDUCE})
"""The changes that a graph may make without being asked."""


@functools.lru_cache(maxsize=4096)
def change_between(before: Layout, after: Layout, shape: Shape, place: Place) -> Change:
    """The work that leads from one layout of a tensor to another.

    Raises:
        ValueError: `after` has summands along an axis along which `before` has none.
    """
    if before == after:
        return Change.NONE
    if not set(after.summands) <= set(before.summands):
        raise ValueError("no transfer makes summands")
    positions = [place.position(rank) for rank in place.ranks]
    held_regions = [before.region(shape, position) for position in positions]
    new_regions = [after.region(shape, position) for position in positions]
    pairs = [*zip(held_regions, new_regions, strict=True)]
    if all(overlap(held, new) == new for held, new in pairs):
        return Change.SLICE if after.summands == before.summands else Change.REDUCE
    grows = all(overlap(held, new) == held for held, new in pairs)
    return Change.GATHER if grows else Change.RESHARD
