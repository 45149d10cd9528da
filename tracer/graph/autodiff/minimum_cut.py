"""A minimum cut between two nodes of a network, by a maximum flow.

Source: Dinic, Algorithm for solution of a problem of maximum flow in networks with power
estimation, Soviet Mathematics Doklady 11, 1970.
"""

from __future__ import annotations

from collections import deque


class FlowNetwork:
    """A directed network with integer capacities; its nodes are numbers.

    Args:
        nodes: the number of nodes.
    """

    def __init__(self, nodes: int) -> None:
        self._leaving: list[list[int]] = [[] for _ in range(nodes)]
        # Edge e goes to _target[e]; edge e ^ 1 is its reverse.
        self._target: list[int] = []
        self._capacity: list[int] = []

    def add_edge(self, start: int, end: int, capacity: int) -> None:
        """Add an edge from `start` to `end`."""
        for node, other, room in ((start, end, capacity), (end, start, 0)):
            self._leaving[node].append(len(self._target))
            self._target.append(other)
            self._capacity.append(room)

    def source_side(self, source: int, sink: int) -> set[int]:
        """The nodes on the source's side of a minimum cut; the fewest of all such cuts.

        The flow uses up the capacities, so a network serves once.
        """
        while True:
            levels = self._levels(source, sink)
            if levels[sink] < 0:
                return {node for node, level in enumerate(levels) if level >= 0}
            self._block(source, sink, levels)

    def _levels(self, source: int, sink: int) -> list[int]:
        """The distance of each node from the source over edges with room; -1: out of reach."""
        levels = [-1] * len(self._leaving)
        levels[source] = 0
        pending = deque([source])
        while pending:
            node = pending.popleft()
            if node == sink:
                continue
            for edge in self._leaving[node]:
                end = self._target[edge]
                if self._capacity[edge] and levels[end] < 0:
                    levels[end] = levels[node] + 1
                    pending.append(end)
        return levels

    def _block(self, source: int, sink: int, levels: list[int]) -> None:
        """Send flow along shortest paths until each of them has an edge without room."""
        upcoming = [0] * len(self._leaving)
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                flow = min(self._capacity[edge] for edge in path)
                for edge in path:
                    self._capacity[edge] -= flow
                    self._capacity[edge ^ 1] += flow
                full = next(i for i, edge in enumerate(path) if not self._capacity[edge])
                node = self._target[path[full] ^ 1]
                del path[full:]
                continue
            edges = self._leaving[node]
            while upcoming[node] < len(edges):
                edge = edges[upcoming[node]]
                if self._capacity[edge] and levels[self._target[edge]] == levels[node] + 1:
                    break
                upcoming[node] += 1
            else:
                if node == source:
                    return
                node = self._target[path.pop() ^ 1]
                upcoming[node] += 1
                continue
            path.append(edge)
            node = self._target[edge]
