"""Give each value of a graph a layout, in the order in which values are computed.

The caller gives the layouts of inputs and pins; the rules of the ops decide all others. Where an op
cannot take a value in its layout, the value is transferred: summands are reduced, a copy is sliced.
Anything more is an error, unless the caller allows it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .....ir.layout import Layout
from .....ir.types import Place
from ..cases import (
    Answer,
    Case,
    Expansion,
    LayoutError,
    whole,
)
from ..change import DEFAULT, Change
from ..expansions import replace_by, traced
from ..functional import read_later
from ..routes import still_true
from ..rules.table import rule_of
from ..versions import End, Propagation, Version, rewire
from .own_rows import with_own_rows
from .refusals import check_given, check_in_place, gradient_refusal
from .version_maker import VersionMaker
from .visited_nodes import Locations


def propagate(
    graph: fx.Graph,
    place: Place,
    input_layouts: Mapping[fx.Node, Layout],
    *,
    ends: Sequence[End] = (),
    like: Mapping[fx.Node, fx.Node] | None = None,
    pins: Mapping[fx.Node, Layout] | None = None,
    allowed: frozenset[Change] = DEFAULT,
    locations: Locations | None = None,
    attention: str | None = None,
    sequence: Collection[str] = (),
    weights: Collection[fx.Node] = (),
) -> Propagation:
    """Lay out a graph of aten ops at logical shapes.

    Args:
        graph: the traced graph, with fake tensors in `meta["val"]` of its nodes. It is not changed.
        place: the ranks that compute it.
        input_layouts: layouts of placeholders, and of other nodes that stand for inputs, such as
            cotangents. A placeholder without a layout is a copy on each rank.
        ends: one for each output, flattened; an output without an end is reduced if it is a sum.
        like: for nodes that stand for inputs, the value whose cuts they have: cotangents.
        pins: layouts in which all users take a value; any transfer may make them.
        allowed: the changes that transfers may make where no pin asks for more.
        locations: the user's line of nodes, by name.
        attention: the form of attention over a cut sequence: "gather", "heads" or "ring"; None: the
            one that is expected to be the fastest.
        sequence: axes that cut tokens between layers whose weights they cut.
        weights: the nodes of weights, which the axes of the sequence may cut.

    Returns:
        A copy of the graph with the layouts of its values, and the transfers between them.

    Raises:
        LayoutError: an op has no rule, or layouts contradict each other.
    """
    run = _Propagator(
        graph, place, input_layouts, like or {}, pins or {}, allowed, locations or {}, ends
    )
    run.attention = attention
    run.weights = {run.copies[node] for node in weights}
    run.sequence = frozenset(axis for axis in sequence if run.sizes.get(axis, 1) > 1)
    return run.all()


class _Propagator(VersionMaker):
    """One propagation."""

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
        run = Propagation(
            self.graph,
            self.place,
            self.copies,
            self.layouts,
            self.answers,
            self.reads,
            tuple(self.transfers),
            outputs,
            self.locations,
            frozenset(self.passing),
        )
        return with_own_rows(run)

    def _visit(self, node: fx.Node) -> fx.Node:
        """Lay out a node; return the next one, which is new if the node has been expanded."""
        if node in self.like:
            self.input_layouts[node] = Layout(self.versions[self.like[node]][-1].layout.cuts)
        if node in self.input_layouts or node.op in ("placeholder", "get_attr"):
            fake = node.meta.get("val")
            rank = fake.dim() if isinstance(fake, torch.Tensor) else 0
            layout = self.input_layouts.get(node, whole(rank))
            check_given(layout, rank, self.place, node.name, self.locations.get(node))
            self._lay_out(node, (layout,))
        elif node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(index, int)
            self._lay_out(node, (self.layouts[source][index],), self.routings.get(source))
            if source in self.summed:
                self.summed[node] = self.summed[source]
        else:
            case = self._case(node)
            answer = rule_of(node.target, case.loc)(case)
            if isinstance(answer, Expansion):
                return self._expand(node, case, answer)
            self._take(node, case, answer)
        self.note_kind(node)
        if node in self.pins:
            self._offer(node, self.pins[node])
        return node.next

    def _offer(self, node: fx.Node, layout: Layout) -> None:
        """Let all users of a value take it in a layout that a pin asks for."""
        pinned = self._version(node, layout, None, "", allowed=frozenset(Change))
        versions = self.versions[node]
        if pinned in versions:
            versions.remove(pinned)
        versions.append(pinned)

    def _take(self, node: fx.Node, case: Case, answer: Answer) -> None:
        reads, allowed = [], frozenset(Change) if answer.is_asked else None
        self.why = answer.why or self.why
        for index, (operand, layout) in enumerate(zip(case.operands, answer.wanted, strict=True)):
            reason = answer.reasons.get(index, "")
            free = frozenset(Change) if index in answer.dispatched else allowed
            rows = answer.dispatched.get(index)
            reads.append(self._version(operand.node, layout, node, reason, free, rows))
            if index in answer.passing:
                self.note_passing(reads[-1])
        check_in_place(case, answer, self.versions)
        self.routings = still_true(self.routings, node)
        self.summed = still_true(self.summed, node)
        self.answers[node], self.reads[node] = answer, tuple(reads)
        self._lay_out(node, answer.results, answer.routing)
        self._note_sum(node)
        if answer.is_asked:  # it is a copy, so in other layouts it is what is there already
            for version in self.versions[case.operands[0].node]:
                self.read_versions.setdefault(Version(node, version.layout), version)

    def _expand(self, node: fx.Node, case: Case, expansion: Expansion) -> fx.Node:
        """Put the ops of an expansion in the place of a node; return the first of them."""
        inner = traced(case, expansion, node.meta["val"])
        self.why = expansion.why or self.why
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
