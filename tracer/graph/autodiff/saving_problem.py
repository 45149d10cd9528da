"""Choose which values to save and which to compute again, within a number of bytes.

For a price of a byte, the cheapest choice is a minimum cut. A value that the backward needs is on
the source's side. An edge from a value to its operator costs the value's bytes: it is cut where the
value is saved. An edge from an operator to the sink costs its work: it is cut where the operator
runs again, and then its operands are needed, too. Prices from zero on give the lower convex hull of
bytes and work. Between its corners single operators are exchanged.

Source: the cut is that of He and Yu, Transcending Runtime-Memory Tradeoffs in Checkpointing by
being Fusion Aware, MLSys 2023, with a price for bytes: Everett, Generalized Lagrange Multiplier
Method for Solving Problems of Optimum Allocation of Resources, Operations Research 11, 1963.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from .minimum_cut import FlowNetwork

LEVELS = 48
"""The most steps, in equal parts of the bytes that can be spared, in which a frontier descends."""
_EXCHANGED = 40
"""The most operators that are tried one by one between two corners of the hull."""
_SEARCHED = 16
"""The most operators of a problem that is searched by branch and bound."""
_BRANCHES = 400
"""The most branches that a search looks at."""
_SPREAD = 1024
"""The work of the last operator counts one part in so many more than it is."""


@dataclass(frozen=True, slots=True)
class SavingChoice:
    """A choice of what to save.

    Attributes:
        again: the operators that run again.
        saved: the values that are saved.
        size: the bytes of these values.
        work: the work of these operators.
    """

    again: frozenset[int]
    saved: frozenset[int]
    size: int
    work: int


@dataclass(frozen=True)
class SavingProblem:
    """The values and operators of a forward, by number, and what its backward needs of them.

    Attributes:
        sizes: for each value its bytes; 0 if it lives anyway.
        makers: for each value the operator that gives it; None if no operator can give it again.
        works: for each operator its work.
        operands: for each operator the values that it takes.
        needed: the values that the backward needs.
        unsaved: values that must not be saved; each has a maker.
    """

    sizes: tuple[int, ...]
    makers: tuple[int | None, ...]
    works: tuple[int, ...]
    operands: tuple[tuple[int, ...], ...]
    needed: tuple[int, ...]
    unsaved: frozenset[int] = frozenset()

    def choice(self, again: Iterable[int]) -> SavingChoice:
        """The values that are saved if the backward may run these operators again."""
        allowed = set(again)
        saved: set[int] = set()
        run: set[int] = set()
        pending = list(self.needed)
        while pending:
            value = pending.pop()
            maker = self.makers[value]
            if maker is None or (maker not in allowed and value not in self.unsaved):
                saved.add(value)
            elif maker not in run:
                run.add(maker)
                pending += self.operands[maker]
        # A value that was saved before its maker turned out to run again comes from that.
        if any(self.makers[value] in run for value in saved):
            return self.choice(allowed | run)
        return SavingChoice(
            frozenset(run),
            frozenset(saved),
            sum(self.sizes[value] for value in saved),
            sum(self.works[maker] for maker in run),
        )

    def cheapest(self, work: int, size: int) -> SavingChoice:
        """The choice with the least `choice.work * size + choice.size * work`.

        So `size` bytes may be saved by `work`.
        """
        values = len(self.sizes)
        source, sink = values + len(self.works), values + len(self.works) + 1
        network = FlowNetwork(sink + 1)
        never = sum(self.sizes) * work + sum(self.works) * size + 1
        for value in set(self.needed):
            network.add_edge(source, value, never)
        for value, (bytes_, maker) in enumerate(zip(self.sizes, self.makers, strict=True)):
            price = never if value in self.unsaved else bytes_ * work
            network.add_edge(value, sink if maker is None else values + maker, price)
        for maker, (price, taken) in enumerate(zip(self.works, self.operands, strict=True)):
            network.add_edge(values + maker, sink, price * size)
            for value in taken:
                network.add_edge(values + maker, value, never)
        side = network.source_side(source, sink)
        return self.choice(node - values for node in side if values <= node < source)

    def branches(self, relaxed: SavingChoice, is_too_large: bool) -> list[SavingProblem]:
        """Two problems that have all choices of this one: an operator runs again, or it does not.

        Args:
            relaxed: the cheapest choice at some price.
            is_too_large: whether it saves too much. Then an operator is taken whose values it
                saves, and else one that it runs again; the one with the most bytes that is open.
        """
        closed = {self.makers[value] for value in self.unsaved}
        saving = {maker for value in relaxed.saved if (maker := self.makers[value]) is not None}
        first, second = (saving, relaxed.again) if is_too_large else (relaxed.again, saving)
        unsettled = sorted(first - closed or second - closed)
        if not unsettled:
            return []
        size_of = dict.fromkeys(unsettled, 0)
        for size, owner in zip(self.sizes, self.makers, strict=True):
            if owner in size_of:
                size_of[owner] += size
        chosen = max(unsettled, key=size_of.__getitem__)
        values = {value for value, owner in enumerate(self.makers) if owner == chosen}
        makers = tuple(None if owner == chosen else owner for owner in self.makers)
        never, always = replace(self, makers=makers), replace(self, unsaved=self.unsaved | values)
        return [never, always] if is_too_large else [always, never]


class Frontier:
    """The corners of the hull of a problem, which serve any number of limits.

    Attributes:
        corners: choices, the most bytes first.
    """

    def __init__(self, problem: SavingProblem) -> None:
        self._plain = problem
        # Layers that are alike leave the hull in one step, unless their work differs a little.
        count = len(problem.works)
        spread = (work * (_SPREAD * count + op) for op, work in enumerate(problem.works))
        self._problem = problem = replace(problem, works=tuple(spread))
        most = problem.choice(())
        total = sum(problem.works) + 1
        least = problem.cheapest(total * (sum(problem.sizes) + 1), 1)
        if least.size >= most.size:
            least = most
        self._step = max(1, (most.size - least.size) // LEVELS)
        inner = self._between(most, least) if least is not most else ()
        self.corners: list[SavingChoice] = [most, *inner, *([least] if least is not most else ())]

    def _between(self, more: SavingChoice, less: SavingChoice) -> Iterator[SavingChoice]:
        """The corners between two, in order; none where these are close to each other."""
        work, size = less.work - more.work, more.size - less.size
        if size <= self._step or work <= 0:
            return
        middle = self._problem.cheapest(work, size)
        if not less.size < middle.size < more.size:
            return
        yield from self._between(more, middle)
        yield middle
        yield from self._between(middle, less)

    def within(self, limit: int) -> SavingChoice:
        """A choice of little work that saves at most `limit` bytes; the smallest if none does."""
        index = self._below(limit)
        choice = self._between_corners(limit)
        if 0 < index < len(self.corners) and len(self._problem.works) <= _SEARCHED:
            choice = self._searched(choice, self.corners[index - 1], self.corners[index], limit)
        return self._plain.choice(choice.again)

    def _below(self, limit: int) -> int:
        """The index of the first corner that saves at most `limit` bytes."""
        return bisect_left(self.corners, -limit, key=lambda corner: -corner.size)

    def _between_corners(self, limit: int) -> SavingChoice:
        """The better of two ways between the corners around a limit."""
        index = self._below(limit)
        if index == len(self.corners):
            return self.corners[-1]
        below = self.corners[index]
        if not index or below.size == limit:
            return below
        above = self.corners[index - 1]
        return min(
            self._filled(below, above, limit),
            self._filled(self._emptied(above, below, limit), above, limit),
            key=lambda choice: (choice.work, choice.size),
        )

    def choices(self) -> list[SavingChoice]:
        """The corners, and choices between corners far apart; each smaller, with more work."""
        limits = {corner.size for corner in self.corners}
        is_small = len(self._problem.works) <= _SEARCHED
        for above, below in pairwise(self.corners):
            if is_small or above.size - below.size > 2 * self._step:
                limits.update(range(below.size, above.size, self._step))
        chosen: list[SavingChoice] = []
        for limit in sorted(limits):
            choice = self._plain.choice(self._between_corners(limit).again)
            while chosen and chosen[-1].work >= choice.work and chosen[-1].size >= choice.size:
                chosen.pop()
            if not chosen or choice.work < chosen[-1].work:
                chosen.append(choice)
        return chosen[::-1]

    def _filled(self, choice: SavingChoice, above: SavingChoice, limit: int) -> SavingChoice:
        """Run fewer operators again, the ones with the most work for a byte first."""
        if choice.size > limit:
            return self.corners[-1]
        best = choice
        while True:
            candidates = sorted(best.again - above.again)[:_EXCHANGED]
            tried = [self._problem.choice(best.again - {op}) for op in candidates]
            fitting = [c for c in tried if c.size <= limit and c.work < best.work]
            if not fitting:
                return best
            size, work = best.size, best.work
            best = max(fitting, key=lambda c: (work - c.work) / max(1, c.size - size))

    def _emptied(self, choice: SavingChoice, below: SavingChoice, limit: int) -> SavingChoice:
        """Run more operators again until it fits, those with the least work for a byte first."""
        best = choice
        while best.size > limit:
            candidates = sorted(below.again - best.again)[:_EXCHANGED]
            tried = [self._problem.choice(best.again | {op}) for op in candidates]
            smaller = [c for c in tried if c.size < best.size]
            if not smaller:
                return below
            size, work = best.size, best.work
            best = min(smaller, key=lambda c: (c.work - work) / (size - max(c.size, limit) or 1))
        return best

    def _searched(
        self, choice: SavingChoice, above: SavingChoice, below: SavingChoice, limit: int
    ) -> SavingChoice:
        """The best choice for a limit, by branch and bound with the price between two corners."""
        work, size = below.work - above.work, above.size - below.size
        best = choice
        pending = [self._problem]
        for _ in range(_BRANCHES):
            if not pending:
                break
            problem = pending.pop()
            relaxed = problem.cheapest(work, size)
            if relaxed.size <= limit and relaxed.work < best.work:
                best = relaxed
            bound = relaxed.work * size + (relaxed.size - limit) * work
            if bound < best.work * size:
                pending += problem.branches(relaxed, relaxed.size > limit)
        return best
