"""Nodes that run in the parts that read their results, and not as soon as they could.

A node can run in the first part that has its operands. A backward has all saved values from its
start, so it would make what all layers compute of them at once: casts, transposed copies and
values that are computed again. Ranks would hold these together. So a node is put off to the first
part that reads it, if that part then takes no more bytes from earlier ones.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from .....ir.packing import numel_at_rank
from ....method.node_memory import memory_of
from ....values.operators import written_values
from ..versions import Propagation, Version
from .part_order import gives_views, is_product, movable


@dataclass
class LateNodes:
    """The nodes of a partition, most of them in the first part in which they can run.

    Attributes:
        propagation: the graph.
        nodes: its nodes that run, in the order of the graph.
        parts: the part of each; `move` changes it.
        results: the versions that the partition gives.
        reads: gives the versions that a node reads.
        available: gives the first part in which a version can be read.
        source: gives the version that a slice is taken of.
        ids_of: gives the ids that travel with a version.
        is_given: whether a version is an input of the partition though one of `nodes` computes it.
        stays: whether a rank holds a version for all parts, as it does state.
        is_held: whether a node has to stay where it is, since its memory is written to.
    """

    propagation: Propagation
    nodes: Collection[fx.Node]
    parts: dict[fx.Node, int]
    results: Collection[Version | None]
    reads: Callable[[fx.Node], Iterable[Version]]
    available: Callable[[Version], int]
    source: Callable[[Version], Version]
    ids_of: Callable[[Version], Iterator[Version]]
    is_given: Callable[[Version], bool]
    stays: Callable[[Version], bool]
    is_held: Callable[[fx.Node], bool]
    _until: dict[Version, float] = field(default_factory=dict)
    _exchanged: set[fx.Node] = field(default_factory=set)

    def move(self) -> None:
        """Move three kinds of nodes to the parts that read their results.

        These are values whose layout no type has, so that they can go to no other part; views that
        are not exchanged, since a view that goes to another part would be copied; and other
        operators whose operands are no larger than their results, or are held anyway. Scalars of
        the third kind stay: they hold nothing, and what numbers them would tell layers apart.
        """
        self._note_lives()
        result_nodes = {version.node for version in self.results if version is not None}
        written = self._written()
        latest: dict[fx.Node, int] = {}
        for node in reversed(list(self.nodes)):
            group = movable(node, self.parts, self.is_held)
            part = max(self.parts[node], latest.get(node, 0))
            if group and part > self.parts[node] and node.target is not operator.getitem:
                if is_product(node, self.propagation) or gives_views(node):
                    moves = is_product(node, self.propagation) or node not in self._exchanged
                else:
                    moves = result_nodes.isdisjoint(group) and self._exchanged.isdisjoint(group)
                    moves = moves and not self._is_beside(node)
                    moves = moves and written.isdisjoint(self._memories(node))
                    moves = moves and self._is_smaller(node, part)
                if moves:
                    self.parts.update(dict.fromkeys(group, part))
                    self._live(node, part)
            self._bound(node, latest)

    def _bound(self, node: fx.Node, latest: dict[fx.Node, int]) -> None:
        """Note how late the operands of a node may be computed."""
        for version in self.reads(node):
            if self.is_given(version) or version.node not in self.parts:
                continue
            exchanges = self.available(version) - self.parts[version.node]
            if exchanges:
                self._exchanged.add(version.node)
            bound = self.parts[node] - exchanges
            if node.target is operator.getitem:  # its tuple may go as far as its items
                bound = latest.get(node, bound)
                self._exchanged.update(node.all_input_nodes if node in self._exchanged else ())
            latest[version.node] = min(latest.get(version.node, bound), bound)
            for ids in self.ids_of(version):  # they stay: how late they may be is not known
                self._exchanged.add(ids.node)
                latest[ids.node] = 0

    def _is_beside(self, node: fx.Node) -> bool:
        """True if a node runs beside an exchange, as a step of a ring does: it keeps its part."""
        answer = self.propagation.answers.get(node)
        return answer is not None and answer.is_late

    # -- bytes -------------------------------------------------------------------------------

    def _note_lives(self) -> None:
        """Note the last part that reads each value."""
        for node in self.nodes:
            self._live(node, self.parts[node])
        for version in self.results:
            if version is not None:
                self._read(version, float("inf"))

    def _live(self, node: fx.Node, part: int) -> None:
        if node.target is not operator.getitem:
            for version in self.reads(node):
                self._read(version, part)

    def _read(self, version: Version, part: float) -> None:
        base = self._base(version)
        self._until[base] = max(self._until.get(base, 0), part)

    def _is_smaller(self, node: fx.Node, part: int) -> bool:
        """True if what has to wait for a node is no larger than its results.

        Args:
            node: the node.
            part: the part in which it would run.
        """
        reads = list(self.reads(node))
        if any(self._is_copied(version, node, part) for version in reads):
            return False
        operands = dict.fromkeys(map(self._base, reads))
        waiting = [
            version
            for version in operands
            if not self.stays(version) and self._until.get(version, 0) < part
        ]
        items = [user for user in node.users if user.target is operator.getitem]
        results = [value for value in items or [node] if value in self.parts and _is_tensor(value)]
        if all(value.meta["val"].dim() == 0 for value in results):
            return False
        versions = (Version(value, self.propagation.layout(value)) for value in results)
        return sum(map(self._bytes, waiting)) <= sum(map(self._bytes, versions))

    def _is_copied(self, version: Version, node: fx.Node, part: int) -> bool:
        """True if an operand is a view that another node needs in an earlier part."""
        view = self.source(version).node
        if view not in self.parts or not gives_views(view):
            return False
        others = (user for user in view.users if user is not node and user in self.parts)
        return view in self._exchanged or any(self.parts[user] < part for user in others)

    def _base(self, version: Version) -> Version:
        """The version whose memory a version has: the base of views, where no transfer made it."""
        version = self.source(version)
        while version.node in self.parts and not self.is_given(version):
            if self.available(version) != self.parts[version.node] or not gives_views(version.node):
                break
            version = self.source(next(iter(self.reads(version.node))))
        return version

    def _bytes(self, version: Version) -> int:
        if not _is_tensor(version.node):
            return 0
        fake = version.node.meta["val"]
        count = numel_at_rank(tuple(fake.shape), version.layout, self.propagation.place)
        itemsize: int = fake.dtype.itemsize
        return count * itemsize

    # -- memory that is written to ---------------------------------------------------------------

    def _written(self) -> set[int | None]:
        """The memories that nodes write to."""
        values = (
            value
            for node in self.nodes
            for value in written_values(node.target, node.args, node.kwargs)
        )
        return {memory_of(value) for value in values if isinstance(value, fx.Node)}

    def _memories(self, node: fx.Node) -> set[int | None]:
        return {memory_of(value) for value in (node, *node.all_input_nodes)} - {None}


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
