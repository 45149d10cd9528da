"""Where a joint graph is cut: what is the backward, and what it takes from the forward.

What the backward takes is saved, with three refinements. A result of an operator with several
results stays with its operator, so no tuple is saved. A view is saved as its base, of which the
backward takes the view again, so that no memory counts twice. A parameter or buffer is not saved
but looked up again, unless it changes before the backward runs: then what it held is saved.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from ..methods.joint import Joint
from .subgraphs import is_view, live_nodes, reshapes_in_place, written_in_place


class Cut:
    """What the backward takes from the forward.

    Args:
        joint: a joint graph that was traced with a derivative.
        volatile: indices of state that other calls change before the backward runs.
        recompute: whether the backward computes again what it needs of the forward, so that
            nothing but inputs is saved.

    Attributes:
        body: the nodes of the backward, in order.
        saved: values to be saved.
        looked_up: state that the backward reads where it lives.
    """

    def __init__(
        self, joint: Joint, volatile: Collection[int] = (), recompute: bool = False
    ) -> None:
        self._joint = joint
        self._state = {n: i for i, (n, _) in enumerate(joint.state)}
        self._rebound = {id(r.tensor) for r, _ in joint.rebinds}
        self._volatile = volatile
        graph = joint.owner.graph
        self._views = not reshapes_in_place(graph)
        self._forward = joint.forward
        roots = self.results()
        if recompute:
            self._forward = frozenset(n.name for n in (*self._state, *joint.inputs))
        else:
            roots += joint.outputs
        inside = self._forward | {n.name for n in joint.cotangents}
        live = live_nodes(graph, roots)
        self.body = [
            n for n in graph.nodes if n in live and n.op == "call_function" and n.name not in inside
        ]
        self.saved: set[fx.Node] = set()
        self.looked_up: set[fx.Node] = set()
        for node in self.body:
            for source in node.all_input_nodes:
                self._need(source)
        for node in self.results():
            self._need(node)

    def results(self) -> list[fx.Node]:
        """The gradients that the backward computes."""
        joint = self._joint
        return [n for n in joint.input_grads if n is not None] + [n for _, n in joint.state_grads]

    def base(self, node: fx.Node) -> fx.Node | None:
        """What to save instead of a node, if it can be had from that without computing."""
        if not self._views or node.op != "call_function":
            return None
        written = written_in_place(node)
        if written is not None:
            return written
        first = node.args[0] if node.args else None
        return first if is_view(node) and isinstance(first, fx.Node) else None

    def origin(self, node: fx.Node) -> fx.Node:
        """What a node is a view of, or the node itself."""
        while (base := self.base(node)) is not None:
            node = base
        return node

    def _need(self, node: fx.Node) -> None:
        """Note that the backward uses a node."""
        if node.op == "get_attr" or node.name not in self._forward:
            return
        node = self.origin(node)
        if node.op == "get_attr":
            return
        if node in self._state and not self._is_changed(node):
            self.looked_up.add(node)
        else:
            self.saved.add(node)

    def _is_changed(self, node: fx.Node) -> bool:
        joint, index = self._joint, self._state[node]
        if index in self._volatile or id(joint.state[index][1]) in self._rebound:
            return True
        return index in joint.written and index not in joint.backward_written
