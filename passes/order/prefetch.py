"""Gather stored parameters before they are needed, and take in reduced gradients later.

Both are decided once for all ranks. Each rank's program is a part of one order, so all members of a
group have their collectives in the same order. If ranks moved collectives by themselves, for
instance by the sizes of their own pieces, they could come to them in different orders.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from .work import ProgramWork


def prefetch(work: ProgramWork, order: Sequence[int], window: int) -> list[int]:
    """Place gathers of parameters, and uses of reduced gradients, so that they overlap with calls.

    A gather is issued `window` calls before the call that needs it, on the same ranks, or as soon
    as its input is there. The nodes that wait for the gather come just before that call. The nodes
    that wait for a reduction come `window` calls behind it, or ahead of the next node that has to
    follow them.

    Args:
        work: the nodes; those that move are in `ahead`, `uses` and `behind`.
        order: the order of all nodes.
        window: the number of calls.
    """
    return _Placement(work, order, window).all()


class _Placement:
    """The nodes that move, each with the position ahead of which it comes."""

    def __init__(self, work: ProgramWork, order: Sequence[int], window: int) -> None:
        self._work = work
        self._window = window
        self._moving = work.ahead | work.uses | work.behind
        self._fixed = [node for node in order if node not in self._moving]
        self._index = {node: i for i, node in enumerate(self._fixed)}
        self._rank = {node: i for i, node in enumerate(order)}
        # For each rank the positions of the calls that compute.
        self._calls: dict[int, list[int]] = {}
        for i, node in enumerate(self._fixed):
            op = work.program.ops[node]
            if node in work.computing and op.place is not None:
                for rank in op.place.ranks:
                    self._calls.setdefault(rank, []).append(i)
        self._at: dict[int, int] = {}

    def all(self) -> list[int]:
        for i, node in enumerate(self._fixed):
            for followed in self._work.follows[node]:
                self._place(followed, i)
        end = len(self._fixed)
        for node in sorted(self._moving, key=self._rank.__getitem__):
            self._place(node, end)
        before: dict[int, list[int]] = {}
        for node, i in self._at.items():
            before.setdefault(i, []).append(node)
        order: list[int] = []
        for i, node in enumerate([*self._fixed, -1]):
            order += sorted(before.get(i, ()), key=self._priority)
            if node >= 0:
                order.append(node)
        return order

    def _priority(self, node: int) -> tuple[int, int]:
        """The sort key of nodes at one position: gathers first, and otherwise the old order."""
        kind = 0 if node in self._work.ahead else 1 if node in self._work.behind else 2
        return kind, self._rank[node]

    def _place(self, node: int, needed: int) -> None:
        """Place a node, and the nodes that it follows, ahead of the position that needs it."""
        if node not in self._moving:
            return
        known = self._at.get(node)
        if known is not None:
            self._at[node] = min(known, needed)
            return
        follows = self._work.follows[node]
        for followed in follows:
            self._place(followed, needed)
        earliest = max((self._after(followed) for followed in follows), default=0)
        if node in self._work.ahead:
            chosen = self._before(node, needed)
        elif node in self._work.behind and self._work.behind.isdisjoint(follows):
            chosen = self._behind(node, earliest)
        elif node in self._work.behind:
            chosen = earliest
        else:
            chosen = needed
        self._at[node] = min(max(chosen, earliest), max(needed, earliest))

    def _after(self, node: int) -> int:
        """The first position behind a node."""
        fixed = self._index.get(node)
        return self._at[node] if fixed is None else fixed + 1

    def _before(self, node: int, needed: int) -> int:
        """The position of the call that is `window` calls before the one that needs the node."""
        calls = self._of(node)
        at = bisect_left(calls, needed) - self._window
        if self._window == 0:
            return needed
        return calls[at] if at >= 0 else 0

    def _behind(self, node: int, since: int) -> int:
        """The position `window` calls behind the position `since`."""
        calls = self._of(node)
        at = bisect_right(calls, since - 1) + self._window
        return calls[at] if at < len(calls) else len(self._fixed)

    def _of(self, node: int) -> Sequence[int]:
        """The positions of calls on the ranks of a node."""
        place = self._work.program.ops[node].place
        return self._calls.get(place.ranks[0], ()) if place is not None else ()
