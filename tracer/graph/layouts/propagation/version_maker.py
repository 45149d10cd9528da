"""Make the versions of values in which ops take them: by transfers, or by copies of cheap ops."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import fx

from .....ir.layout import WHOLE, Cut, Layout
from .....ir.location import Location
from .....ir.types import Place
from ....values.operators import is_random
from ..cases import (
    Answer,
    Case,
    Expansion,
    ExpertRows,
    Operand,
    Results,
    Routing,
    shapes,
    tensors,
)
from ..change import ORDER, Change, change_between
from ..cuts import without_axes
from ..expansions import copied
from ..expert_rows import experts_of, kept, moves_rows, summed_rows
from ..functional import without_writes
from ..rules.pointwise import is_pointwise
from ..rules.table import LINEAR, VIEWS, rule_of
from ..versions import End, LayoutTransfer, RowTransfer, Version
from .refusals import refusal

Locations: TypeAlias = Mapping[str, Location]

_EVERYTHING = frozenset(Change)

_TO_COPY = torch.ops.aten._to_copy.default
_EXPAND = torch.ops.aten.expand.default
_CHEAP = LINEAR | {_TO_COPY, torch.ops.aten.clone.default}
"""Ops that may be computed again, rather than that their results travel."""

_TERMS = LINEAR | {_TO_COPY, torch.ops.aten.add.Tensor}
"""Ops that lead from a term of a parameter's gradient to the gradient."""


def _length(version: Version) -> int:
    """The number of entries of a value."""
    return math.prod(version.node.meta["val"].shape)


class VersionMaker:
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
        return Case(
            target, arguments, operands, dense, self.sizes, asked, loc, stays, self.attention
        )

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
        version = self.versions[node][-1]
        shape = tuple(fake.shape)
        return Operand(node, shape, fake.dtype, version.layout, self._routing(version))

    def _routing(self, version: Version) -> Routing | None:
        """The ranks that have the rows of a version, unless its rows have been added up."""
        routing = self.routings.get(version.node)
        return routing if routing and {*routing.cut.axes} <= {*version.layout.summands} else None

    def _version(
        self,
        node: fx.Node,
        layout: Layout,
        user: fx.Node | None,
        reason: str,
        allowed: frozenset[Change] | None = None,
        rows: ExpertRows | None = None,
    ) -> Version:
        """A value in a layout; by a transfer if it has another layout.

        Args:
            node: computes the value.
            layout: the layout.
            user, reason: the op that needs it, and why, for errors.
            allowed: the changes that a transfer may make; None: those that any may.
            rows: the rows that are needed; None: all. If they are gathered, only `user` gets them.
        """
        target = Version(node, layout)
        if target in self.versions[node]:
            return target
        if target in self.read_versions:
            return self.read_versions[target]
        before, change = self._cheapest(node, layout)
        if target in self.dispatched:  # whoever needs the other rows, too, may gather them
            allowed = _EVERYTHING
        if change not in (self.allowed if allowed is None else allowed):
            loc = self.locations.get(node if user is None else user)
            raise refusal(before, target, change, user, reason, loc)
        moved = self._moved_rows(before, layout, change, rows)
        if moved is not None and change is Change.GATHER:
            target = replace(target, rows=rows)
            if target in self.read_versions:
                return self.read_versions[target]
        instead = None
        if change is Change.SLICE:
            instead = self._remade(before, layout) or self._sliced_before(before, layout)
        elif change is Change.REDUCE:
            instead = self._reduced_before(before, layout)
        elif change is Change.GATHER:
            instead = self._gathered_before(before, layout, target.rows)
        if instead is None:
            why = self.why if change.communicates else ""
            self.transfers.append(LayoutTransfer(before, target, change, moved, why))
            self.why = "" if why else self.why
        self.read_versions[target] = instead or target
        if target.rows is not None:
            self.dispatched.add(replace(target, rows=None))
            return self.read_versions[target]
        if change is Change.REDUCE:
            self.versions[node].append(self.read_versions[target])
        elif change.communicates:  # other users still prefer the versions that were there before
            self.versions[node].insert(0, self.read_versions[target])
        return self.read_versions[target]

    def _moved_rows(
        self, before: Version, layout: Layout, change: Change, needed: ExpertRows | None
    ) -> RowTransfer | None:
        """The rows that travel in a transfer, if those of experts are enough."""
        rows = self.summed.get(before.node) if change is Change.REDUCE else needed
        if rows is None or not self.versions.get(rows.ids):
            return None
        ids_layout = without_axes(self.versions[rows.ids][-1].layout, frozenset(rows.cut.axes))
        shape = tuple(before.node.meta["val"].shape)
        if not moves_rows(before.layout, layout, change, shape, rows, ids_layout):
            return None
        ids = self._version(rows.ids, ids_layout, None, "", _EVERYTHING)
        return RowTransfer(ids, experts_of(rows, self.place), rows.lead)

    def _note_sum(self, node: fx.Node) -> None:
        """Write down in which rows an op's results may be other than zero."""
        rows = summed_rows(node, self.answers[node], self.reads[node], self.summed)
        if rows is not None:
            self.summed[node] = rows

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

    def _sliced_before(self, before: Version, layout: Layout) -> Version | None:
        """The value computed in pieces of what is broadcast to it, such as a mask of positions.

        So no rank makes a whole mask, of which it needs the rows of its queries.
        """
        node = before.node
        if before.layout.summands or not self._is_broadcast(node):
            return None
        shape = tuple(node.meta["val"].shape)
        reads = []
        for read in self.reads[node]:
            own = tuple(read.node.meta["val"].shape)
            cuts = layout.cuts[len(shape) - len(own) :]
            sizes = shape[len(shape) - len(own) :]
            pairs = zip(own, sizes, cuts, strict=True)
            reads.append(
                replace(read, layout=Layout(tuple(c if n == m else WHOLE for n, m, c in pairs)))
            )
        again = self._again(node, tuple(reads), layout, None)
        if again is not None:
            self.reads[again.node] = tuple(
                self._version(read.node, read.layout, node, "") for read in reads
            )
        return again

    def _is_broadcast(self, node: fx.Node) -> bool:
        """True if a value is made, entry by entry, of values that are smaller."""
        reads = self.reads.get(node, ())
        if not reads or any(read.layout.summands for read in reads):
            return False
        target = node.target
        if target is not _EXPAND and (
            is_random(target, node.args, node.kwargs)
            or not isinstance(target, torch._ops.OpOverload)
            or not is_pointwise(target)
        ):
            return False
        length = node.meta["val"].numel()
        return all(
            read.node.meta["val"].numel() < length or self._is_broadcast(read.node)
            for read in reads
        )

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

    def _gathered_before(
        self, before: Version, layout: Layout, rows: ExpertRows | None
    ) -> Version | None:
        """The value by a copy of its op that takes gathered operands, if the op is cheap.

        A gradient that is expanded for each choice of a token is gathered once a token, so. If only
        some rows of it are needed, the same rows of operands are gathered.
        """
        axes = frozenset(before.layout.axes).difference(layout.axes)
        is_coarser = layout == without_axes(before.layout, axes)
        most = _length(before) - (before.node.target not in VIEWS)
        if not is_coarser or self._gathered(before, axes) > most:
            return None
        sources = self.reads[before.node]
        reads = tuple(replace(r, layout=without_axes(r.layout, axes)) for r in sources)
        own = [rows and kept(before.node, index, rows) for index in range(len(reads))]
        if rows is not None and any(
            some is None and read != source
            for some, read, source in zip(own, reads, sources, strict=True)
        ):
            return None
        ids = None if rows is None else rows.ids
        again = self._again(before.node, reads, layout, None, ids)
        if again is not None:
            self.reads[again.node] = tuple(
                self._version(read.node, read.layout, before.node, "", _EVERYTHING, some)
                for read, some in zip(reads, own, strict=True)
            )
        return again

    def _gathered(self, version: Version, axes: frozenset[str], depth: int = 8) -> int:
        """The entries that are exchanged at least to have a value that these axes do not cut."""
        target = replace(version, layout=without_axes(version.layout, axes))
        if target in self.read_versions or target in self.versions[version.node]:
            return 0
        reads = self.reads.get(version.node, ()) if version.node.target in _CHEAP else ()
        if not reads or not depth:
            return _length(version)
        return min(_length(version), sum(self._gathered(r, axes, depth - 1) for r in reads))

    def _is_there(self, version: Version) -> bool:
        """True if a reduced value is there, or follows from a sum that has been reduced."""
        node, layout = version.node, version.layout
        if version in self.read_versions or version in self.versions[node]:
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
        ids: fx.Node | None = None,
    ) -> Version | None:
        """The result of a copy of an op that takes other versions, if it has this layout.

        The copy stands behind the ids that say which rows it takes, if some do.
        """
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
        with self.graph.inserting_after(node if ids is None or ids < node else ids):
            copy = self.graph.node_copy(node)
        self.answers[copy], self.reads[copy] = new, reads
        self._lay_out(copy, new.results, new.routing)
        self._note_sum(copy)
        if node in self.locations:
            self.locations[copy] = self.locations[node]
        return Version(copy, layout)
