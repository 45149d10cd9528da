"""Rows that are on the ranks of their experts, on their way through an op.

A product with experts that are cut over ranks gives a sum over these ranks, but of each row all
summands are zero but one, which is the row. So such a sum need not be reduced where an op is not
linear. It goes through any op that keeps rows apart and makes zeros of zeros, as activations do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from torch import fx

from ....ir.attributes import ReduceOp
from ....ir.layout import Cut, Layout
from ...method.node_memory import memory_of
from ...values.operators import written_values
from .cases import Case, ExpertRows, Operand, Results, Routing
from .cuts import canonical
from .factors import Dims, Factor, Factors

_ByIds = TypeVar("_ByIds", Routing, ExpertRows)


@dataclass(frozen=True)
class Route:
    """A `Routing` of an op's tensors, by factors.

    Attributes:
        ids, experts, cut: as there.
        factors: those of the dimensions that are those of `ids`, in order.
    """

    ids: fx.Node
    experts: int
    cut: Cut
    factors: tuple[Factor, ...]


@dataclass(frozen=True)
class Routes:
    """The routed sums that an op takes, and those that it gives.

    Attributes:
        results: the dimensions of the op's results.
        chosen: the cut of the factor of experts, if the op has one that is cut.
        own: the route of an op that has experts: that of the rows that its own experts give.
        passed: for each axis along which routed sums go through the op, their route.
        factors: the dimensions of the op.
    """

    results: tuple[Dims | None, ...]
    chosen: Mapping[Factor, Cut]
    own: Route | None
    passed: Mapping[str, Route] = field(default_factory=dict)
    factors: Factors | None = None

    @staticmethod
    def of(case: Case, factors: Factors) -> Routes:
        """The routes through an op."""
        chosen, own = _own(case, factors)
        passed = dict(_passed(case, factors, own))
        whole = {a: r for a, r in passed.items() if passed.keys() >= set(r.cut.axes)}
        return Routes(factors.results, chosen, own, whole, factors)

    @property
    def axes(self) -> frozenset[str]:
        """Axes along which ranks have rows by expert, so that they cut nothing but experts."""
        return frozenset(self.passed).union(*(cut.axes for cut in self.chosen.values()))

    def passing(self, operand: Operand) -> set[str]:
        """The axes of an operand's summands that go through the op as rows of experts."""
        return set(operand.layout.summands).intersection(self.passed)

    def of_results(self, layouts: Results) -> Routing | None:
        """The routing of the results, if it is the same for all."""
        if None in layouts:
            return None
        for route in self._all():
            positions = {
                _positions(route, dims, layout)
                for dims, layout in zip(self.results, layouts, strict=True)
            }
            if len(positions) == 1 and (dims_of_ids := positions.pop()) is not None:
                return Routing(route.ids, route.experts, route.cut, dims_of_ids)
        return None

    def needed(self, index: int) -> ExpertRows | None:
        """The rows of an operand that an op's results depend on, if these are those of experts.

        An op with experts reads no others. One through which routed sums pass gives zeros for the
        others, unless a zero in the operand becomes something infinite, as in a division.
        """
        factors = self.factors
        if factors is None or (factors.choice is not None and factors.choice[1] == index):
            return None
        is_linear = frozenset({index}) in factors.linear
        routes = self._all() if is_linear else [self.own] if self.own is not None else []
        rows = (_rows(route, factors.operands[index]) for route in routes)
        return next((own for own in rows if own is not None), None)

    def summed(self, layouts: Results) -> ExpertRows | None:
        """The rows in which the results are not zero, if these are the same for all."""
        for route in self._all():
            leads = {
                _rows(route, dims) if layout and {*route.cut.axes} <= {*layout.summands} else None
                for dims, layout in zip(self.results, layouts, strict=True)
            }
            if len(leads) == 1 and (rows := leads.pop()) is not None:
                return rows
        return None

    def _all(self) -> list[Route]:
        routes = dict.fromkeys((self.own, *self.passed.values()))
        return [route for route in routes if route is not None]


def _rows(route: Route, dims: Dims | None) -> ExpertRows | None:
    """The rows of a tensor that stand along its leading dimensions, in the order of the ids."""
    lead = 0
    for dim, factor in zip(dims or (), route.factors, strict=False):
        if dim != (factor,):
            break
        lead += 1
    return ExpertRows(route.ids, route.experts, route.cut, lead) if lead else None


def still_true(routings: Mapping[fx.Node, _ByIds], node: fx.Node) -> dict[fx.Node, _ByIds]:
    """The routings behind a node: rows are not routed by ids that it writes in place."""
    written = written_values(node.target, node.args, node.kwargs)
    memories = {memory_of(value) for value in written if isinstance(value, fx.Node)}
    return {n: r for n, r in routings.items() if memory_of(r.ids) not in memories}


def _own(case: Case, factors: Factors) -> tuple[dict[Factor, Cut], Route | None]:
    """The cut of the factor of experts, and the route of the rows that they give."""
    if factors.choice is None or factors.choice[0] in factors.keep:
        return {}, None
    factor, index = factors.choice
    ids, size = case.operands[index], factors.sizes[factor]
    rows = tuple(dim[0] for dim in factors.operands[index])
    cuts = [
        canonical(cut, size, case.sizes)
        for dims, operand in zip(factors.operands, case.operands, strict=True)
        for dim, cut in zip(dims, operand.cuts, strict=True)
        if dim == (factor,) and cut
    ]
    routes = [_route(case, factors, other) for other in range(len(case.operands))]
    cuts += [
        route.cut
        for route in routes
        if route is not None and route == Route(ids.node, size, route.cut, rows)
    ]
    if not cuts or not cuts[0]:
        return {}, None
    return {factor: cuts[0]}, Route(ids.node, size, cuts[0], rows)


def _passed(case: Case, factors: Factors, own: Route | None) -> Iterator[tuple[str, Route]]:
    """The axes along which all summands are rows by one route, and go through the op."""
    for axis in case.sizes:
        members = frozenset(
            index
            for index, operand in enumerate(case.operands)
            if axis in operand.layout.summands and index not in factors.passive
        )
        routes = {_route(case, factors, index) for index in members}
        route = next(iter(routes)) if len(routes) == 1 else None
        if route is None or axis not in route.cut.axes:
            continue
        if own is not None and axis in own.cut.axes and route != own:
            continue
        if any(operands <= members for operands in (*factors.linear, *factors.zeros)):
            yield axis, route


def _route(case: Case, factors: Factors, index: int) -> Route | None:
    """The route of an operand, if the op keeps its rows apart."""
    operand = case.operands[index]
    routing = operand.routing
    if routing is None or operand.layout.reduce is not ReduceOp.SUM:
        return None
    dims = [factors.operands[index][dim] for dim in routing.dims]
    if any(len(dim) != 1 or dim[0] in factors.keep for dim in dims):
        return None
    rows = tuple(dim[0] for dim in dims)
    return Route(routing.ids, routing.experts, routing.cut, rows)


def _positions(route: Route, dims: Dims | None, layout: Layout | None) -> tuple[int, ...] | None:
    """The dimensions of a result that are those of the ids, if it has all of them."""
    if dims is None or layout is None or not set(route.cut.axes) <= set(layout.summands):
        return None
    if any((factor,) not in dims for factor in route.factors):
        return None
    return tuple(dims.index((factor,)) for factor in route.factors)
