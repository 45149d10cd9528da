"""Make the versions of values in which ops take them: by transfers, or by copies of cheap ops."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain

import torch
from torch import fx

from .....ir.layout import WHOLE, Cut, Layout
from ....values.operators import is_random
from ..cases import Expansion, ExpertRows
from ..change import ORDER, Change, change_between
from ..cuts import factor_sizes, spread, without_axes
from ..expert_rows import experts_of, kept, moves_rows, summed_rows
from ..rules.pointwise import is_pointwise
from ..rules.table import LINEAR, VIEWS, rule_of
from ..versions import LayoutTransfer, RowTransfer, Version
from .refusals import refusal
from .visited_nodes import VisitedNodes

_EVERYTHING = frozenset(Change)

_TO_COPY = torch.ops.aten._to_copy.default
_EXPAND = torch.ops.aten.expand.default
_RESHAPE = torch.ops.aten._unsafe_view.default
_CHEAP = LINEAR | {_TO_COPY, torch.ops.aten.clone.default}
"""Ops that may be computed again, rather than that their results travel."""


def _length(version: Version) -> int:
    """The number of entries of a value."""
    return math.prod(version.node.meta["val"].shape)


class VersionMaker(VisitedNodes):
    """Makes the versions of values of visited nodes."""

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
            raise refusal(before, target, change, user, reason, loc, self.sequence)
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
        if instead is None and change.communicates:
            instead = self._moved_by_factors(before, layout)
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
        ids_layout = self._without(self.versions[rows.ids][-1], frozenset(rows.cut.axes)).layout
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
        if read is None:
            return None
        reduced = Version(read.node, read.layout.keeping(layout.summands))
        if before.layout.cuts != layout.cuts:  # entry by entry, it is cut as its result is
            if not self.sequence or read.node.meta["val"].shape != node.meta["val"].shape:
                return None
            reduced = Version(read.node, Layout(layout.cuts).keeping(()))
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
        is_coarser = layout == self._without(before, axes).layout
        most = _length(before) - (before.node.target not in VIEWS)
        if not is_coarser or self._gathered(before, axes) > most:
            return None
        sources = self.reads[before.node]
        reads = tuple(self._without(r, axes) for r in sources)
        own = [rows and kept(before.node, index, rows) for index in range(len(reads))]
        if rows is not None and any(
            some is None and read != source
            for some, read, source in zip(own, reads, sources, strict=True)
        ):
            return None
        ids = None if rows is None else rows.ids
        again = self._again(before.node, reads, layout, None, ids)
        if again is not None:
            self.again.add(again.node)
            self.reads[again.node] = tuple(
                self._version(read.node, read.layout, before.node, "", _EVERYTHING, some)
                for read, some in zip(reads, own, strict=True)
            )
        return again

    def _moved_by_factors(self, before: Version, layout: Layout) -> Version | None:
        """A value with a dimension that is a product of cut factors, moved as these factors.

        No type of a transfer has such a product. None if there is none.
        """
        shape, sizes = tuple(before.node.meta["val"].shape), self.sizes
        by_dim = [
            factor_sizes(size, *cuts)
            for size, *cuts in zip(shape, before.layout.cuts, layout.cuts, strict=True)
        ]
        if all(len(factors) == 1 for factors in by_dim):
            return None
        split = [
            [spread(cut, factors, sizes) for cut, factors in zip(cuts, by_dim, strict=True)]
            for cuts in (before.layout.cuts, layout.cuts)
        ]
        if any(cuts is None for own in split for cuts in own):
            return None
        old, new = (tuple(cut for cuts in own for cut in cuts or ()) for own in split)
        apart = self._viewed(before, [*chain(*by_dim)], replace(before.layout, cuts=old))
        if apart is None:
            return None
        moved = replace(layout, cuts=new)
        after = Version(apart.node, moved)
        if after not in self.read_versions:
            self.read_versions[after] = after
            change = change_between(apart.layout, moved, (*chain(*by_dim),), self.place)
            self.transfers.append(LayoutTransfer(apart, after, change, None, self.why))
            self.why = ""
        return self._viewed(after, [*shape], layout)

    def _viewed(self, source: Version, shape: list[int], layout: Layout) -> Version | None:
        """A value in another shape, if it has this layout there."""
        with self.graph.inserting_after(source.node):
            node = self.graph.call_function(_RESHAPE, (source.node, shape))
        node.meta["val"] = source.node.meta["val"].reshape(shape)
        if source.node in self.locations:
            self.locations[node] = self.locations[source.node]
        case = self._case(node)
        (operand,) = (replace(o, layout=source.layout) for o in case.operands)
        arguments = {**case.arguments, "self": operand}
        answer = rule_of(_RESHAPE, case.loc)(
            replace(case, arguments=arguments, operands=(operand,))
        )
        if isinstance(answer, Expansion) or answer.results[0] != layout:
            self.graph.erase_node(node)
            return None
        self.answers[node], self.reads[node] = answer, (source,)
        self._lay_out(node, answer.results)
        return Version(node, layout)

    def _without(self, version: Version, axes: frozenset[str]) -> Version:
        """A value in the coarser layout that these axes do not cut."""
        shape = tuple(version.node.meta["val"].shape)
        return replace(version, layout=without_axes(version.layout, shape, axes, self.sizes))

    def _gathered(self, version: Version, axes: frozenset[str], depth: int = 8) -> int:
        """The entries that are exchanged at least to have a value that these axes do not cut."""
        target = self._without(version, axes)
        if target in self.read_versions or target in self.versions[version.node]:
            return 0
        reads = self.reads.get(version.node, ()) if version.node.target in _CHEAP else ()
        if not reads or not depth:
            return _length(version)
        return min(_length(version), sum(self._gathered(r, axes, depth - 1) for r in reads))

    def _preferred(self, node: fx.Node) -> Version:
        """The version that rules see: a gradient in tokens, if what it is made of is there so."""
        version = super()._preferred(node)
        read = self._sum(version) if node in self.gradients else None
        if read is None or self.sequence.isdisjoint(read.layout.summands):
            return version
        if read.node.meta["val"].shape != node.meta["val"].shape:
            return version
        layouts = (v.layout for v in self.versions[read.node])
        tokens = next((own for own in layouts if self._has_tokens(own)), None)
        return version if tokens is None else self._version(node, tokens, None, "")

    def _has_tokens(self, layout: Layout) -> bool:
        """True if axes of the sequence cut a value, which is no sum."""
        axes = [axis for cut in layout.cuts for axis in cut.axes]
        return not layout.summands and not self.sequence.isdisjoint(axes)

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
