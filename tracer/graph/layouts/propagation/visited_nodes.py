"""The layouts of the nodes of a graph that have been visited, and the case of the next node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from .....ir.layout import Cut, Layout
from .....ir.location import Location
from .....ir.types import Place
from ..cases import (
    Answer,
    Case,
    ExpertRows,
    Operand,
    Results,
    Routing,
    shapes,
    tensors,
)
from ..change import Change
from ..expansions import copied
from ..functional import without_writes
from ..rules.table import LINEAR, rule_of
from ..versions import End, LayoutTransfer, Version

Locations: TypeAlias = Mapping[str, Location]

_TO_COPY = torch.ops.aten._to_copy.default
_TERMS = LINEAR | {_TO_COPY, torch.ops.aten.add.Tensor}
"""Ops that lead from a term of a parameter's gradient to the gradient."""


class VisitedNodes:
    """The layouts of the nodes that have been visited, and the versions of their values."""

    def __init__(
        self,
        graph: fx.Graph,
        place: Place,
        input_layouts: Mapping[fx.Node, Layout],
        like: Mapping[fx.Node, fx.Node],
        pins: Mapping[fx.Node, Layout],
        allowed: frozenset[Change],
        names: Locations,
        ends: Sequence[End],
    ) -> None:
        self.place, self.ends = place, ends
        self.attention: str | None = None
        self.sequence: frozenset[str] = frozenset()
        self.why = ""
        """The reason for the form of the op that is laid out; its first exchange has it."""
        self.sizes = dict(place.axes)
        self.allowed = allowed
        self.graph, self.copies = copied(graph)
        self.locations = {c: names[n.name] for n, c in self.copies.items() if n.name in names}
        new = without_writes(self.graph).items()
        self.locations |= {n: self.locations[w] for n, w in new if w in self.locations}
        self.input_layouts = {self.copies[node]: layout for node, layout in input_layouts.items()}
        self.like = {self.copies[node]: self.copies[source] for node, source in like.items()}
        self.pins = {self.copies[node]: layout for node, layout in pins.items()}
        self.asked: dict[fx.Node, tuple[Cut, ...]] = {}
        self.layouts: dict[fx.Node, Results] = {}
        self.answers: dict[fx.Node, Answer] = {}
        self.routings: dict[fx.Node, Routing] = {}
        self.summed: dict[fx.Node, ExpertRows] = {}
        """For sums over ranks of experts, the rows in which a rank's summand is not zero."""
        self.reads: dict[fx.Node, tuple[Version, ...]] = {}
        self.transfers: list[LayoutTransfer] = []
        self.versions: dict[fx.Node, list[Version]] = {}
        """The versions of each value that transfers start from; rules see the last one."""
        self.dispatched: set[Version] = set()
        """The versions of which ranks have gathered the rows of their experts."""
        self.weights: set[fx.Node] = set()
        """Weights, and values that follow from weights alone."""
        self.gradients: set[fx.Node] = set(self.like)
        """Values that follow from cotangents."""
        self.passing: set[Version] = set()
        """Versions that are gathered for one op, and that no backward takes of a forward."""
        self.again: set[fx.Node] = set()
        """Copies of ops that take gathered values, so that their results are not gathered."""
        self.read_versions: dict[Version, Version] = {}
        """For each version that was asked for, the version that is read in its place."""

    def _lay_out(self, node: fx.Node, layouts: Results, routing: Routing | None = None) -> None:
        self.layouts[node] = layouts
        if routing is not None:
            self.routings[node] = routing
        if isinstance(node.meta.get("val"), torch.Tensor) and layouts[0] is not None:
            self.versions[node] = [Version(node, layouts[0])]

    def _case(self, node: fx.Node) -> Case:
        target = node.target
        loc = self.locations.get(node)
        if not isinstance(target, torch._ops.OpOverload):
            rule_of(target, loc)
            raise AssertionError("only operators have rules")
        asked = self.asked.get(node)
        arguments: dict[str, Any] = {}
        for index, argument in enumerate(target._schema.arguments):
            default = argument.default_value
            value = (
                node.args[index]
                if index < len(node.args)
                else node.kwargs.get(argument.name, default)
            )
            arguments[argument.name] = fx.node.map_arg(value, self._operand)
        operands = tuple(operand for value in arguments.values() for operand in tensors(value))
        val = node.meta.setdefault("val", None)  # an op that only writes or checks has no result
        stays = target is _TO_COPY and self._stays_a_sum(node)
        dense = shapes(target, val, loc)
        end = self._end_cuts(node) if self.sequence else None
        return Case(
            *(target, arguments, operands, dense, self.sizes, asked, loc, stays, self.attention),
            *(self.sequence, end),
        )

    def _end_cuts(self, node: fx.Node) -> tuple[Cut, ...] | None:
        """The cuts of the state whose gradient a value is a term of; None if it is none."""
        for user in node.users:
            if user.op == "output":
                flat: list[fx.Node] = []
                fx.node.map_arg(user.args, flat.append)
                ends = (self._end_of(i) for i, n in enumerate(flat) if n is node)
                return next((end.layout.cuts for end in ends if end.path and end.layout), None)
            if user.target in _TERMS and (cuts := self._end_cuts(user)) is not None:
                return cuts
        return None

    def _stays_a_sum(self, node: fx.Node) -> bool:
        """True if a value is a term of gradients alone, which may stay summands."""
        for user in node.users:
            if user.op == "output":
                flat: list[fx.Node] = []
                fx.node.map_arg(user.args, flat.append)
                if not all(self._end_of(i).summands for i, n in enumerate(flat) if n is node):
                    return False
            elif user.target not in _TERMS or not self._stays_a_sum(user):
                return False
        return True

    def _end_of(self, index: int) -> End:
        return self.ends[index] if index < len(self.ends) else End()

    def _operand(self, node: fx.Node) -> Any:
        fake = node.meta["val"]
        if node not in self.versions:
            return fake
        version = self._preferred(node)
        shape = tuple(fake.shape)
        kinds = (node in self.weights, node in self.gradients)
        return Operand(node, shape, fake.dtype, version.layout, self._routing(version), *kinds)

    def _preferred(self, node: fx.Node) -> Version:
        """The version of a value that rules see."""
        return self.versions[node][-1]

    def note_passing(self, version: Version) -> None:
        """Write down that a version, or what it is made of, is gathered for one op."""
        if version.node not in self.again:
            self.passing.add(version)
            return
        for read in self.reads[version.node]:
            self.note_passing(read)

    def note_kind(self, node: fx.Node) -> None:
        """Write down whether a value follows from weights alone, or from cotangents."""
        sources = node.all_input_nodes
        if not self.gradients.isdisjoint((node, *sources)):
            self.gradients.add(node)
        elif sources and self.weights.issuperset(sources):
            self.weights.add(node)

    def _routing(self, version: Version) -> Routing | None:
        """The ranks that have the rows of a version, unless its rows have been added up."""
        routing = self.routings.get(version.node)
        return routing if routing and {*routing.cut.axes} <= {*version.layout.summands} else None
