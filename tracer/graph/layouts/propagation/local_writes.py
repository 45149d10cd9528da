"""Writes in place to values that a method computes, which exchanges and later parts take as copies.

A value has its memory in the part that computes it. Exchanges and later parts take copies, which
are made at the end of that part.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from ....method.node_memory import memory_of
from ....values.operators import written_values
from ...autodiff.subgraphs import is_view, written_in_place
from ..cases import LayoutError
from ..change import Change
from ..versions import LayoutTransfer, Propagation, Version


@dataclass
class LocalWrites:
    """The writes in place of a graph that are not to state.

    Attributes:
        propagation: the graph.
        parts: the part of each node that runs, in the order of the graph.
        reads: gives the versions that a node takes.
        transfers: the transfers, by the versions that they make.
        state: the memories of the state, whose writes `StateWrites` keeps in order.
    """

    propagation: Propagation
    parts: Mapping[fx.Node, int]
    reads: Callable[[fx.Node], Iterable[Version]]
    transfers: Mapping[Version, LayoutTransfer]
    state: frozenset[int | None]
    _last: dict[Version | fx.Node, int] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse writes that a reader of a copy would see too early, or not at all.

        Raises:
            LayoutError: there is one.
        """
        for position, node in enumerate(self.parts):
            for version in self._written(node):
                self._check_write(node, version)
                self._last[self._owner(version)] = position
        for position, node in enumerate(self.parts) if self._last else ():
            for version in self.reads(node):
                if self._is_early(node, version, position):
                    raise self._error(version.node, "is used, in a copy, in front of the write")

    def _written(self, node: fx.Node) -> list[Version]:
        if node.target is operator.getitem:
            return []
        values = written_values(node.target, node.args, node.kwargs)
        memories = {memory_of(value) for value in values if isinstance(value, fx.Node)} - self.state
        return [version for version in self.reads(node) if memory_of(version.node) in memories]

    def _check_write(self, node: fx.Node, version: Version) -> None:
        owner = self._owner(version)
        if isinstance(owner, fx.Node):
            is_elsewhere = self.parts.get(owner, self.parts[node]) != self.parts[node]
            if is_elsewhere and not self._is_first(node, owner):
                raise self._error(version.node, "is computed in front of an exchange")
            return
        transfer = self.transfers[owner]
        # Whatever reads the value behind a reduction takes the sum.
        if transfer.change is not Change.REDUCE or self._owner(transfer.before) is not owner.node:
            raise self._error(version.node, "is a copy")

    def _is_first(self, node: fx.Node, owner: fx.Node) -> bool:
        """True if a write fills memory that holds nothing yet, and its part alone uses it."""
        if owner.target is not torch.ops.aten.empty_strided.default:
            return False
        memory = memory_of(owner)
        return all(
            self.parts[user] == self.parts[node]
            for user in self.parts
            if user is not owner and any(memory_of(v.node) == memory for v in self.reads(user))
        )

    def _owner(self, version: Version) -> Version | fx.Node:
        """What has the memory of a version: the op that made it, or a transfer."""
        while version not in self.transfers:
            node = version.node
            if node not in self.parts or not (is_view(node) or written_in_place(node) is not None):
                return node
            version = next(iter(self.reads(node)))
        return version

    def _is_early(self, node: fx.Node, version: Version, position: int) -> bool:
        """True if a node takes a copy that is made behind a later write."""
        owner = self._owner(version)
        if is_view(node):
            return False
        part = self.parts.get(owner) if isinstance(owner, fx.Node) else self.parts[node]
        if part is not None and part != self.parts[node] and position < self._last.get(owner, -1):
            return True
        while isinstance(owner, Version):
            owner = self._owner(self.transfers[owner].before)
            if position < self._last.get(owner, -1):
                return True
        return False

    def _error(self, node: fx.Node, problem: str) -> LayoutError:
        return LayoutError(
            f"%{node.name} {problem}, and its memory is written in place",
            loc=self.propagation.locations.get(node),
            remedy="compute a new tensor instead of the write, as by torch.cat or torch.where",
        )
