"""Where a graph uses each value last, so that its source drops the value there."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx


def last_uses(graph: fx.Graph, constants: Collection[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that nothing uses once it has run, without constants."""
    last_uses: dict[fx.Node, list[fx.Node]] = {}
    seen = set(constants)
    for node in reversed(graph.nodes):
        if node.op == "placeholder" or node in constants:
            continue
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                if node.op != "output":
                    last_uses.setdefault(node, []).append(source)
        if node not in seen and node.op != "output":  # run for its effect alone
            last_uses.setdefault(node, []).append(node)
    return last_uses
