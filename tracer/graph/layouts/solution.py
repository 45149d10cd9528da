"""Solve the layouts of an op's operands and results by its factors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ....ir.attributes import ReduceOp
from ....ir.layout import WHOLE, Cut, Layout
from .cases import Answer, Case, Local, Operand
from .cuts import canonical, count, join, refines, spread, without
from .factors import Dims, Factor, Factors
from .routes import Routes
from .tokens import gathered_factor


def solve(
    case: Case,
    factors: Factors,
    *,
    sizes: Mapping[str, int] | None = None,
    local: Local | None = None,
    free: Mapping[int, Factor] | None = None,
    tokens: Factor | None = None,
) -> Answer:
    """Lay an op out by its factors.

    Where operands disagree, the larger one keeps its layout, and the answer has the reason why the
    other cannot.

    Args:
        case: the op.
        factors: its dimensions.
        sizes, local: as in `Answer`.
        free: dimensions of the first result that could be cut at no cost, with their factors.
        tokens: the factor of tokens that the op needs of all ranks; None: see `gathered_factor`.

    Returns:
        The layouts in which the op takes its operands and gives its results.
    """
    solution = _Solution(case, factors, tokens)
    if case.asked is not None:
        solution.ask(case.asked, free or {})
    return solution.answer(sizes or {}, local, frozenset(free or {}))


class _Solution:
    """The cuts of the factors: operands claim them, unless a larger operand contradicts.

    Experts that are cut have the first claim: rows go to them, and not their weights to the rows.
    """

    def __init__(self, case: Case, factors: Factors, tokens: Factor | None) -> None:
        self.case = case
        self.factors = factors
        self.keep = dict(factors.keep)
        self.cuts: dict[Factor, Cut] = {}
        self.by: dict[Factor, Operand] = {}
        self.reasons: dict[int, str] = {}
        self._asked: dict[Factor, Cut] = {}
        self._dispatched: set[int] = set()
        self._routes = Routes.of(case, factors)
        self._tokens = gathered_factor(case, factors) if tokens is None else tokens
        self._again: set[int] = set()

    def ask(self, cuts: tuple[Cut, ...], free: Mapping[int, Factor]) -> None:
        self._asked = {free[dim]: cut for dim, cut in enumerate(cuts) if cut and dim in free}

    def answer(self, sizes: Mapping[str, int], local: Local | None, free: frozenset[int]) -> Answer:
        self._claim()
        while self._refuses():
            self._claim()
        operand_layouts = tuple(
            self._wanted(index, self._joined(dims))
            for index, dims in enumerate(self.factors.operands)
        )
        result_layouts = tuple(
            None if dims is None else self._result(index, self._joined(dims))
            for index, dims in enumerate(self.factors.results)
        )
        routing = self._routes.of_results(result_layouts)
        dispatched = {index: self._routes.needed(index) for index in self._dispatched}
        return Answer(
            operand_layouts,
            result_layouts,
            sizes,
            local,
            free,
            self.reasons,
            dispatched=dispatched,
            routing=routing,
            summed=self._routes.summed(result_layouts),
            passing=frozenset(self._again),
        )

    def _claim(self) -> None:
        """Give each factor the cut of its largest operand, if no axis cuts another factor."""
        self.cuts, self.by, self.reasons = {**self._asked, **self._routes.chosen}, {}, {}
        operands = [*enumerate(self.case.operands)]
        for index, operand in sorted(operands, key=lambda pair: self._rank(pair[1])):
            if index not in self.factors.passive:
                self._claim_operand(index, operand)

    def _rank(self, operand: Operand) -> tuple[int, int]:
        """A key that sorts larger operands first; of equal ones, the one with more pieces.

        The other can then be sliced.
        """
        pieces = math.prod(count(cut, self.case.sizes) for cut in operand.cuts)
        return -math.prod(operand.shape), -pieces

    def _claim_operand(self, index: int, operand: Operand) -> None:
        dims = self.factors.operands[index]
        for number, (dim, cut) in enumerate(zip(dims, operand.cuts, strict=True)):
            if not cut:
                continue
            sizes = [self.factors.sizes[factor] for factor in dim]
            factor_cuts = spread(cut, sizes, self.case.sizes)
            if factor_cuts is None:
                self._cannot(
                    index,
                    f"dimension {number} of {_name(operand)} is {_parts(operand, number, sizes)}",
                )
                continue
            for factor, claimed, size in zip(dim, factor_cuts, sizes, strict=True):
                if claimed:
                    self._claim_factor(
                        index, operand, number, factor, canonical(claimed, size, self.case.sizes)
                    )

    def _claim_factor(
        self, index: int, operand: Operand, number: int, factor: Factor, cut: Cut
    ) -> None:
        if factor in self.keep:
            self._cannot(index, f"dimension {number} of {_name(operand)} {self.keep[factor]}")
            return
        held, sizes = self.cuts.get(factor), self.case.sizes
        if held == cut:
            return
        yields = self._routes.axes.intersection(cut.axes)
        why = "whose ranks have rows by expert"
        if factor == self._tokens and (tokens := self.case.sequence.intersection(cut.axes)):
            yields |= tokens
            why = "which cuts the weight, too"
            self._again.add(index)
        if yields:
            self._dispatched.add(index)
            self._cannot(index, f"dimension {number} of {_name(operand)} is cut along {cut}, {why}")
            size = self.factors.sizes[factor]
            cut = canonical(without(cut, size, yields, sizes), size, sizes)
            if not cut or cut == held:
                return
        if held is not None and refines(held, cut):  # a part of this operand is taken
            return
        if held is not None and not refines(cut, held):
            holder = _name(self.by[factor]) if factor in self.by else "its result"
            self._cannot(
                index,
                f"dimension {number} of {_name(operand)} is cut along {cut}, but along {held} in "
                f"{holder}",
            )
            return
        taken = {a: f for f, held in self.cuts.items() if f != factor for a in held.axes}
        twice = [axis for axis in cut.axes if axis in taken]
        if twice:
            owner = self.by.get(taken[twice[0]])
            self._cannot(
                index,
                f"axis {twice[0]} cuts dimension {number} of {_name(operand)}, and another "
                f"dimension of {_name(owner) if owner else 'its result'}",
            )
            return
        self.cuts[factor], self.by[factor] = cut, operand

    def _cannot(self, index: int, reason: str) -> None:
        self.reasons.setdefault(index, reason)

    def _joined(self, dims: Dims) -> tuple[Cut, ...]:
        sizes = self.factors.sizes
        return tuple(
            join([self.cuts.get(f, WHOLE) for f in dim], [sizes[f] for f in dim], self.case.sizes)
            for dim in dims
        )

    def _refuses(self) -> bool:
        """True if a factor that is cut has to be whole; it is noted in `keep`."""
        if self.factors.reduce is None:
            for factor in self.cuts:
                if self._is_contracted(factor):
                    self.keep[factor] = "has to be whole here"
                    return True
        return False

    def _is_contracted(self, factor: Factor) -> bool:
        results = self.factors.results
        return any(dims is not None and not _has(dims, factor) for dims in results)

    def _passing(self) -> tuple[frozenset[int], set[str]]:
        """The operands whose summands go through a linear op, and the axes of these summands."""
        used = {axis for cut in self.cuts.values() for axis in cut.axes} | self._routes.axes
        contracts = any(self._is_contracted(factor) for factor in self.cuts)
        having: dict[str, set[int]] = {}
        for index, operand in enumerate(self.case.operands):
            for axis in operand.layout.summands:
                if index not in self.factors.passive:
                    having.setdefault(axis, set()).add(index)
        for group in self.factors.linear:  # summands of other operands are reduced
            axes = {a for a, members in having.items() if members >= group and a not in used}
            if axes and self._is_one_sum(group, contracts):
                return group, axes
        return frozenset(), set()

    def _is_one_sum(self, group: frozenset[int], contracts: bool) -> bool:
        """True if one kind of reduction combines the summands of the operands and the result."""
        kinds = {self.case.operands[index].layout.reduce for index in group}
        if contracts and kinds != {self.factors.reduce}:
            return False
        return len(kinds) == 1 and (self.factors.moves or kinds == {ReduceOp.SUM})

    def _wanted(self, index: int, cuts: tuple[Cut, ...]) -> Layout:
        operand = self.case.operands[index]
        if index in self.factors.passive:
            return operand.layout
        group, axes = self._passing()
        passing_axes = self._routes.passing(operand) | (axes if index in group else set())
        summands = tuple(axis for axis in operand.layout.summands if axis in passing_axes)
        if set(operand.layout.summands) - passing_axes:
            self._cannot(
                index,
                f"{_name(operand)} is a sum over ranks along "
                f"{', '.join(operand.layout.summands)}, and the op is not linear in it alone",
            )
        return Layout(cuts, summands, operand.layout.reduce if summands else ReduceOp.SUM)

    def _result(self, index: int, cuts: tuple[Cut, ...]) -> Layout:
        group, axes = self._passing()
        dims = self.factors.results[index]
        assert dims is not None
        reduce = ReduceOp.SUM
        if axes:
            reduce = self.case.operands[min(group)].layout.reduce
        contracted = {a for f, c in self.cuts.items() if not _has(dims, f) for a in c.axes}
        if contracted:
            assert self.factors.reduce is not None
            reduce = self.factors.reduce
        cutting = {axis for cut in cuts for axis in cut.axes}
        sums = axes | contracted | (self._routes.passed.keys() - cutting)
        summands = tuple(axis for axis in self.case.sizes if axis in sums)
        return Layout(cuts, summands, reduce)


def _has(dims: Dims, factor: Factor) -> bool:
    return any(factor in dim for dim in dims)


def _name(operand: Operand) -> str:
    return f"%{operand.node.name}"


def _parts(operand: Operand, dim: int, sizes: Sequence[int]) -> str:
    cut = operand.cuts[dim]
    product = " x ".join(map(str, sizes)) or "1"
    return f"{operand.shape[dim]} cut along {cut}, whose pieces are not those of {product}"
