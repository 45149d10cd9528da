"""Give each value of a graph a layout, in the order in which values are computed.

The caller gives the layouts of inputs and pins; the rules of the ops decide all others. Where an op
cannot take a value in its layout, the value is transferred: summands are reduced, a copy is sliced.
Anything more is an error, unless the caller allows it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import fx

from .....ir.layout import Cut, Layout
from .....ir.location import Location
from .....ir.types import Place
from ..cases import (
    Answer,
    Case,
    Expansion,
    LayoutError,
    Operand,
    Results,
    Routing,
    shapes,
    tensors,
    whole,
)
from ..change import DEFAULT, ORDER, Change, change_between
from ..cuts import without_axes
from ..expansions import copied, replace_by, traced
from ..functional import read_later, without_writes
from ..routes import still_true
from ..rules.table import LINEAR, VIEWS, rule_of
from ..versions import End, LayoutTransfer, Propagation, Version, rewire
from .refusals import check_given, check_in_place, gradient_refusal, refusal

Locations: TypeAlias = Mapping[str, Location]


def propagate(
    graph: fx.Graph,
    place: Place,
    given: Mapping[fx.Node, Layout],
    *,
    ends: Sequence[End] = (),
    like: Mapping[fx.Node, fx.Node] | None = None,
    pins: Mapping[fx.Node, Layout] | None = None,
    allowed: frozenset[Change] = DEFAULT,
    locations: Locations | None = None,
) -> Propagation:
    """Lay out a graph of aten ops at logical shapes.

    Args:
        graph: the traced graph, with fake tensors in `meta["val"]` of its nodes. It is not changed.
        place: the ranks that compute it.
        given: layouts of placeholders, and of other nodes that stand for inputs, such as
            cotangents. A placeholder without a layout is a copy on each rank.
        ends: one for each output, flattened; an output without an end is reduced if it is a sum.
        like: for nodes that stand for inputs, the value whose cuts they have: cotangents.
        pins: layouts in which all users take a value; any transfer may make them.
        allowed: the changes that transfers may make where no pin asks for more.
        locations: the user's line of nodes, by name.

    Returns:
        A copy of the graph with the layouts of its values, and the transfers between them.

    Raises:
        LayoutError: an op has no rule, or layouts contradict each other.
    """
    run = _Propagator(graph, place, given, like or {}, pins or {}, allowed, locations or {}, ends)
    return run.all()


_TO_COPY = torch.ops.aten._to_copy.default
_CHEAP = LINEAR | {_TO_COPY}
"""Ops that may be computed again, rather than that their results travel."""

_TERMS = LINEAR | {_TO_COPY, torch.ops.aten.add.Tensor}
"""Ops that lead from a term of a parameter's gradient to the gradient."""


def _length(version: Version) -> int:
    """The number of entries of a value."""
    return math.prod(version.node.meta["val"].shape)


class _Propagator:
    """One propagation."""

    def __init__(
        self,
        graph: fx.Graph,
        place: Place,
        given: Mapping[fx.Node, Layout],
        like: Mapping[fx.Node, fx.Node],
        pins: Mapping[fx.Node, Layout],
        allowed: frozenset[Change],
        names: Locations,
        ends: Sequence[End],
    ) -> None:
        self.place, self.ends = place, ends
        self.sizes = dict(place.axes)
        self.allowed = allowed
        self.graph, self.copies = copied(graph)
        self.locations = {c: names[n.name] for n, c in self.copies.items() if n.name in names}
        new = without_writes(self.graph).items()
        self.locations |= {n: self.locations[w] for n, w in new if w in self.locations}
        self.given = {self.copies[node]: layout for node, layout in given.items()}
        self.like = {self.copies[node]: self.copies[source] for node, source in like.items()}
        self.pins = {self.copies[node]: layout for node, layout in pins.items()}
        self.asked: dict[fx.Node, tuple[Cut, ...]] = {}
        self.layouts: dict[fx.Node, Results] = {}
        self.answers: dict[fx.Node, Answer] = {}
        self.routings: dict[fx.Node, Routing] = {}
        self.reads: dict[fx.Node, tuple[Version, ...]] = {}
        self.transfers: list[LayoutTransfer] = []
        self.versions: dict[fx.Node, list[Version]] = {}
        """The versions of each value that transfers start from; rules see the last one."""
        self.made: dict[Version, Version] = {}
        """For each version that was asked for, the version that is read in its place."""

    def all(self) -> Propagation:
        node = next(iter(self.graph.nodes))
        in_backward = False
        while node.op != "output":
            in_backward = in_backward or node in self.like
            try:
                node = self._visit(node)
            except LayoutError as error:
                where = "in the backward, " if in_backward else ""
                raise LayoutError(
                    where + error.reason, loc=error.loc, remedy=error.remedy
                ) from None
        outputs = tuple(self._outputs(node))
        rewire(self.reads, self.versions, node, outputs)
        return Propagation(
            self.graph,
            self.place,
            self.copies,
            self.layouts,
            self.answers,
            self.reads,
            tuple(self.transfers),
            outputs,
            self.locations,
        )

    def _visit(self, node: fx.Node) -> fx.Node:
        """Lay out a node; return the next one, which is new if the node has been expanded."""
        if node in self.like:
            self.given[node] = Layout(self.versions[self.like[node]][-1].layout.cuts)
        if node in self.given or node.op in ("placeholder", "get_attr"):
            fake = node.meta.get("val")
            rank = fake.dim() if isinstance(fake, torch.Tensor) else 0
            layout = self.given.get(node, whole(rank))
            check_given(layout, rank, self.place, node.name, self.locations.get(node))
            self._lay_out(node, (layout,))
        elif node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(index, int)
            self._lay_out(node, (self.layouts[source][index],), self.routings.get(source))
        else:
            case = self._case(node)
            answer = rule_of(node.target, case.loc)(case)
            if isinstance(answer, Expansion):
                return self._expand(node, case, answer)
            self._take(node, case, answer)
        if node in self.pins:
            self._offer(node, self.pins[node])
        return node.next

    def _lay_out(self, node: fx.Node, layouts: Results, routing: Routing | None = None) -> None:
        self.layouts[node] = layouts
        if routing is not None:
            self.routings[node] = routing
        if isinstance(node.meta.get("val"), torch.Tensor) and layouts[0] is not None:
            self.versions[node] = [Version(node, layouts[0])]

    def _offer(self, node: fx.Node, layout: Layout) -> None:
        """Let all users of a value take it in a layout that a pin asks for."""
        pinned = self._version(node, layout, None, "", allowed=frozenset(Change))
        versions = self.versions[node]
        if pinned in versions:
            versions.remove(pinned)
        versions.append(pinned)

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
        return Case(target, arguments, operands, dense, self.sizes, asked, loc, stays)

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

    def _operand(self, node: fx.Node) -> Any:
        fake = node.meta["val"]
        if node not in self.versions:
            return fake
        version = self.versions[node][-1]
        shape = tuple(fake.shape)
        return Operand(node, shape, fake.dtype, version.layout, self._routing(version))

    def _routing(self, version: Version) -> Routing | None:
        """The ranks that have the rows of a version, unless its rows have been added up."""
        routing = self.routings.get(version.node)
        return routing if routing and {*routing.cut.axes} <= {*version.layout.summands} else None

    def _take(self, node: fx.Node, case: Case, answer: Answer) -> None:
        reads, allowed = [], frozenset(Change) if answer.is_asked else None
        for index, (operand, layout) in enumerate(zip(case.operands, answer.wanted, strict=True)):
            reason = answer.reasons.get(index, "")
            free = frozenset(Change) if index in answer.dispatched else allowed
            reads.append(self._version(operand.node, layout, node, reason, free))
        check_in_place(case, answer, self.versions)
        self.routings = still_true(self.routings, node)
        self.answers[node], self.reads[node] = answer, tuple(reads)
        self._lay_out(node, answer.results, answer.routing)

    def _version(
        self,
        node: fx.Node,
        layout: Layout,
        user: fx.Node | None,
        reason: str,
        allowed: frozenset[Change] | None = None,
    ) -> Version:
        """A value in a layout; by a transfer if it has another layout."""
        target = Version(node, layout)
        if target in self.versions[node]:
            return target
        if target in self.made:
            return self.made[target]
        before, change = self._cheapest(node, layout)
        if change not in (self.allowed if allowed is None else allowed):
            loc = self.locations.get(node if user is None else user)
            raise refusal(before, target, change, user, reason, loc)
        instead = None
        if change is Change.SLICE:
            instead = self._remade(before, layout)
        elif change is Change.REDUCE:
            instead = self._reduced_before(before, layout)
        elif change is Change.GATHER:
            instead = self._gathered_before(before, layout)
        if instead is None:
            self.transfers.append(LayoutTransfer(before, target, change))
        self.made[target] = instead or target
        if change is Change.REDUCE:
            self.versions[node].append(self.made[target])
        elif change.communicates:  # other users still prefer the versions that were there before
            self.versions[node].insert(0, self.made[target])
        return self.made[target]

    def _cheapest(self, node: fx.Node, layout: Layout) -> tuple[Version, Change]:
        shape = tuple(node.meta["val"].shape)
        candidates = []
        for version in self.versions[node]:
            if set(layout.summands) <= set(version.layout.summands):
                change = change_between(version.layout, layout, shape, self.place)
                candidates.append((version, change))
        return min(candidates, key=lambda pair: ORDER.index(pair[1]))

    def _remade(self, before: Version, layout: Layout) -> Version | None:
        """The value computed in pieces at once, by a copy of its op, if that costs nothing."""
        node = before.node
        answer = self.answers.get(node)
        if answer is None or layout.summands != before.layout.summands:
            return None
        changed = {d for d, cut in enumerate(layout.cuts) if cut != before.layout.cuts[d]}
        if before.layout != answer.results[0] or not changed <= answer.free:
            return None
        return self._again(node, self.reads[node], layout, layout.cuts)

    def _reduced_before(self, before: Version, layout: Layout) -> Version | None:
        """The value by a copy of its op that takes the reduced sum, if the op is cheap and linear.

        Several such ops then need one reduction.
        """
        node, read = before.node, self._sum(before)
        if read is None or before.layout.cuts != layout.cuts:
            return None
        reduced = Version(read.node, read.layout.keeping(layout.summands))
        is_longer = read.node.meta["val"].numel() > node.meta["val"].numel()
        if is_longer and not self._is_there(reduced):
            return None
        operand = self._version(reduced.node, reduced.layout, node, "")
        reads = tuple(operand if version is read else version for version in self.reads[node])
        return self._again(node, reads, layout, None)

    def _sum(self, version: Version) -> Version | None:
        """The one sum over ranks that a cheap linear op takes."""
        reads = self.reads.get(version.node, ()) if version.node.target in LINEAR else ()
        sums = [read for read in reads if read.layout.summands]
        if len(sums) == 1 and sums[0].layout.summands == version.layout.summands:
            return sums[0]
        return None

    def _gathered_before(self, before: Version, layout: Layout) -> Version | None:
        """The value by a copy of its op that takes gathered operands, if the op is cheap.

        A gradient that is expanded for each choice of a token is gathered once a token, so.
        """
        axes = frozenset(before.layout.axes).difference(layout.axes)
        is_coarser = layout == without_axes(before.layout, axes)
        most = _length(before) - (before.node.target not in VIEWS)
        if not is_coarser or self._gathered(before, axes) > most:
            return None
        reads = tuple(
            replace(r, layout=without_axes(r.layout, axes)) for r in self.reads[before.node]
        )
        again = self._again(before.node, reads, layout, None)
        if again is not None:
            everything = frozenset(Change)
            self.reads[again.node] = tuple(
                self._version(read.node, read.layout, before.node, "", everything) for read in reads
            )
        return again

    def _gathered(self, version: Version, axes: frozenset[str], depth: int = 8) -> int:
        """The entries that are exchanged at least to have a value that these axes do not cut."""
        target = replace(version, layout=without_axes(version.layout, axes))
        if target in self.made or target in self.versions[version.node]:
            return 0
        reads = self.reads.get(version.node, ()) if version.node.target in _CHEAP else ()
        if not reads or not depth:
            return _length(version)
        return min(_length(version), sum(self._gathered(r, axes, depth - 1) for r in reads))

    def _is_there(self, version: Version) -> bool:
        """True if a reduced value is there, or follows from a sum that has been reduced."""
        node, layout = version.node, version.layout
        if version in self.made or version in self.versions[node]:
            return True
        read = self._sum(self.versions[node][0])
        return read is not None and self._is_there(
            Version(read.node, read.layout.keeping(layout.summands))
        )

    def _again(
        self,
        node: fx.Node,
        reads: tuple[Version, ...],
        layout: Layout,
        asked: tuple[Cut, ...] | None,
    ) -> Version | None:
        """The result of a copy of an op that takes other versions, if it has this layout."""
        case = self._case(node)
        operands = tuple(
            replace(o, layout=version.layout, routing=self._routing(version))
            for o, version in zip(case.operands, reads, strict=True)
        )
        swapped = dict(zip(map(id, case.operands), operands, strict=True))
        arguments = {name: swapped.get(id(value), value) for name, value in case.arguments.items()}
        again = replace(case, arguments=arguments, operands=operands, asked=asked)
        new = rule_of(node.target, case.loc)(again)
        if isinstance(new, Expansion) or new.results[0] != layout:
            return None
        if new.wanted != tuple(operand.layout for operand in operands):
            return None
        with self.graph.inserting_after(node):
            copy = self.graph.node_copy(node)
        self.answers[copy], self.reads[copy] = new, reads
        self._lay_out(copy, new.results, new.routing)
        if node in self.locations:
            self.locations[copy] = self.locations[node]
        return Version(copy, layout)

    def _expand(self, node: fx.Node, case: Case, expansion: Expansion) -> fx.Node:
        """Put the ops of an expansion in the place of a node; return the first of them."""
        inner = traced(case, expansion, node.meta["val"])
        nodes: dict[fx.Node, fx.Node] = {}
        sources = iter(case.operands)
        first: fx.Node | None = None
        with self.graph.inserting_before(node):
            for inner_node in inner.nodes:
                if inner_node.op == "placeholder":
                    nodes[inner_node] = next(sources).node
                elif inner_node.op != "output":
                    copy = nodes[inner_node] = self.graph.node_copy(inner_node, nodes.__getitem__)
                    first = first or copy
                    if inner_node.target in expansion.asked:
                        self.asked[copy] = expansion.asked[inner_node.target]
                    if node in self.locations:
                        self.locations[copy] = self.locations[node]
        read_later(nodes.values(), node)
        (results,) = inner.output_node().args
        replaced = replace_by(node, fx.node.map_arg(results, nodes.__getitem__))
        self.copies = {old: replaced.get(new, new) for old, new in self.copies.items()}
        self.like = {new: replaced.get(source, source) for new, source in self.like.items()}
        self.pins = {replaced.get(new, new): layout for new, layout in self.pins.items()}
        following = node.next
        self.graph.erase_node(node)
        return first or following

    def _outputs(self, output: fx.Node) -> Iterator[Version | None]:
        flat: list[Any] = []
        fx.node.map_arg(output.args, flat.append)
        for index, node in enumerate(flat):
            yield self._end(node, self._end_of(index)) if node in self.versions else None

    def _end_of(self, index: int) -> End:
        return self.ends[index] if index < len(self.ends) else End()

    def _end(self, node: fx.Node, end: End) -> Version:
        """An output in the layout that it ends in."""
        layout = self._final(node, end)
        before, change = self._cheapest(node, layout)
        if end.path and change not in self.allowed:
            loc = self.locations.get(node)
            raise gradient_refusal(end.path, before, Version(node, layout), change, loc)
        return self._version(node, layout, None, "", frozenset(Change) if end.is_asked else None)

    def _final(self, node: fx.Node, end: End) -> Layout:
        offered = self.versions[node][-1].layout
        cuts = offered.cuts if end.layout is None else end.layout.cuts
        used = {axis for cut in cuts for axis in cut.axes}
        summands = [axis for axis in offered.summands if end.summands and axis not in used]
        return replace(offered, cuts=cuts).keeping(summands)
