"""The parts in which state is written in place and read, so that both keep the graph's order.

A node runs in the first part that has its operands. That is too early for a node that reads state
behind a write in place, or writes behind a read: they share memory, and no operand says so. So
reads and writes of one memory keep their order here. Views of written state are taken in the part
that uses them, since a value that goes from part to part has memory of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import fx

from ....method.node_memory import memory_of
from ....values.operators import written_values
from ...autodiff.subgraphs import is_view
from ..cases import LayoutError
from ..versions import Propagation, Version

_REMEDY = "give a copy of it, as by x.clone(), made behind the write"


class StateWrites:
    """The writes of a graph to state.

    Args:
        propagation: the graph.
        nodes: its nodes that run.
        state: placeholders of the state.
    """

    def __init__(
        self, propagation: Propagation, nodes: Iterable[fx.Node], state: Collection[fx.Node]
    ) -> None:
        self._propagation = propagation
        own = {memory_of(node) for node in state}
        self._written: dict[fx.Node, set[int | None]] = {}
        for node in nodes:
            memories = {memory_of(value) for value in _written_by(node)} & own
            if memories:
                self._written[node] = memories
        self._memory = set().union(*self._written.values())
        self._wrote: dict[int | None, int] = {}
        self._read: dict[int | None, int] = {}

    def has(self, node: fx.Node) -> bool:
        """True if a node reads or writes state that is written, or gives a view of it."""
        return memory_of(node) in self._memory or bool(self._touched(node))

    def earliest(self, node: fx.Node) -> int:
        """The first part in which a node can run; to be asked in the order of the graph."""
        written = self._written.get(node, set())
        return max(
            (
                max(self._wrote.get(memory, 0), self._read.get(memory, 0) * (memory in written))
                for memory in self._touched(node)
            ),
            default=0,
        )

    def note(self, node: fx.Node, part: int) -> None:
        """Write down that a node runs in a part."""
        written = self._written.get(node, set())
        for memory in self._touched(node):
            latest = self._wrote if memory in written else self._read
            latest[memory] = max(part, latest.get(memory, 0))

    def move_views(self, parts: dict[fx.Node, int]) -> None:
        """Move views of written state to the parts that use them; `parts` is changed in place.

        Raises:
            LayoutError: several parts use one.
        """
        for node in reversed(parts):
            if memory_of(node) not in self._memory:
                continue
            used = {parts[user] for user in node.users if user in parts}
            if not is_view(node):
                used.add(parts[node])
            if len(used) > 1:
                raise self._error(node, "is used before and behind an exchange between ranks")
            parts[node] = min(used, default=parts[node])

    def check(self, results: Iterable[Version | None], transferred: Iterable[Version]) -> None:
        """Refuse to give or to transfer a value that shares memory with written state.

        Raises:
            LayoutError: a value does.
        """
        for use, versions in (("is given", results), ("is transferred", transferred)):
            for version in versions:
                if version is not None and memory_of(version.node) in self._memory:
                    raise self._error(version.node, use)

    def _touched(self, node: fx.Node) -> set[int | None]:
        return {memory_of(operand) for operand in node.all_input_nodes} & self._memory

    def _error(self, node: fx.Node, problem: str) -> LayoutError:
        return LayoutError(
            f"%{node.name} {problem}, and shares memory with state that is written in place",
            loc=self._propagation.locations.get(node),
            remedy=_REMEDY,
        )


def _written_by(node: fx.Node) -> list[fx.Node]:
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    values = written_values(node.target, node.args, node.kwargs)
    return [value for value in values if isinstance(value, fx.Node)]
