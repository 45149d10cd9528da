"""Take a backward, or a part of one, out of a joint graph, with the values that it needs.

Values that the backward takes from the forward are saved, with three refinements. A `getitem` stays
with its operator, so no tuple is saved. Instead of a view, its base is saved, and the backward
takes the view again, so that no memory counts twice. A parameter or buffer is not saved, but looked
up again, unless it changes before the backward runs: then its old value is saved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from ....ir.types import TensorType
from ...lazy import Lazy
from ...method.joint_graph import Joint
from ...method.node_memory import memory_of, sharing
from ...method.purity.simplify import reshapes_in_place
from ...values.actor_state import StateTensor
from ...values.specs import ir_dtype
from .narrowing import NARROW
from .subgraphs import (
    PieceNodes,
    Subgraph,
    SubgraphBuilder,
    gradients_of,
    has_checks,
    has_effect,
    is_view,
    returned_values,
    type_of,
    written_in_place,
)


class BackwardCut:
    """The nodes of the backward, and the values that they take from the forward.

    Args:
        joint: a joint graph that was traced with a derivative.
        volatile: indices of state that other calls change before the backward runs.
        recomputed: operators of the forward that the backward computes again, if it needs them,
            instead of taking their results.
        narrowable: values that are saved in a smaller type.

    Attributes:
        body: the nodes of the backward, in order. If nothing is written in place, a node that is
            computed again stands right before the node that needs it first.
        saved: the values to be saved.
        looked_up: state that the backward reads where it lives.
        narrow: those of `saved` that are saved in the type `NARROW`.
    """

    def __init__(
        self,
        joint: Joint,
        volatile: Collection[int] = (),
        recomputed: Collection[fx.Node] = (),
        narrowable: Collection[fx.Node] = (),
    ) -> None:
        self._joint = joint
        self._state = {n: i for i, (n, _) in enumerate(joint.state)}
        self._rebound = {id(r.tensor) for r, _ in joint.rebinds}
        self._volatile = volatile
        graph = joint.graph
        self._views = not reshapes_in_place(graph)
        self._forward = joint.forward - {node.name for node in recomputed}
        self.body = self._needed()
        self.saved: set[fx.Node] = set()
        self.looked_up: set[fx.Node] = set()
        for node in self.body:
            for source in node.all_input_nodes:
                self._need(source)
        for node in self.results():
            self._need(node)
        self.narrow = self.saved.intersection(narrowable)

    def type_of(self, node: fx.Node) -> TensorType:
        """The type in which a value is saved."""
        type_ = type_of(node)
        return replace(type_, dtype=ir_dtype(NARROW)) if node in self.narrow else type_

    def results(self) -> list[fx.Node]:
        """The gradients that the backward computes."""
        joint = self._joint
        return [*joint.input_grads, *(n for _, n in joint.state_grads)]

    def _needed(self) -> list[fx.Node]:
        """The nodes that the backward runs: the results need them, or they have an effect."""
        outer_names = self._forward | {node.name for node in self._joint.cotangents}
        live = set(self.results())
        body = []
        for node in reversed(self._joint.graph.nodes):
            is_own = node.op == "call_function" and node.name not in outer_names
            if is_own and (node in live or has_effect(node)):
                live.update(node.all_input_nodes)
                body.append(node)
        body.reverse()
        if any(map(has_effect, body)):
            return body
        return _late(body, self._joint.forward)

    def base(self, node: fx.Node) -> fx.Node | None:
        """Return the node to save instead of a view: its base. None if a node is no view."""
        if not self._views or node.op != "call_function":
            return None
        written = written_in_place(node)
        if written is not None:
            return written
        first = node.args[0] if node.args else None
        return first if is_view(node) and isinstance(first, fx.Node) else None

    def origin(self, node: fx.Node) -> fx.Node:
        """Return the base of a node, through any number of views, or the node itself."""
        while (base := self.base(node)) is not None:
            node = base
        return node

    def _need(self, node: fx.Node) -> None:
        """Write down that the backward uses a node: it is saved, or looked up."""
        if node.op == "get_attr" or node.name not in self._forward:
            return
        node = self.origin(node)
        if node.op == "get_attr":
            return
        if node in self._state and not self.is_changed(node):
            self.looked_up.add(node)
        else:
            self.saved.add(node)

    def is_changed(self, node: fx.Node) -> bool:
        """True if state changes between the forward's use of it and the backward."""
        joint, index = self._joint, self._state[node]
        if index in self._volatile or id(joint.tensors[index]) in self._rebound:
            return True
        return index in joint.written and index not in joint.backward_written


def _late(body: Sequence[fx.Node], forward: Collection[str]) -> list[fx.Node]:
    """The body in an order in which nodes of the forward stand right before their first users."""
    position = {node: index for index, node in enumerate(body)}
    placed: dict[fx.Node, None] = {}
    for node in (*(n for n in body if n.name not in forward), *body):
        needed = {node}
        pending = [node]
        while pending:
            for source in pending.pop().all_input_nodes:
                if source in position and source not in placed and source not in needed:
                    needed.add(source)
                    pending.append(source)
        placed.update(dict.fromkeys(sorted(needed, key=position.__getitem__)))
    return list(placed)


@dataclass(frozen=True)
class BackwardPart:
    """The contents of a piece of a backward, as nodes of the joint graph.

    Attributes:
        nodes: the operators, in order.
        inputs: its inputs: saved values, cotangents, values that another part leaves to it.
        returns: whether it returns the cotangents of inputs.
        gradients: the gradients of state that it computes.
        left: values that it returns for another part, behind the cotangents.
        masks: for operators that compute some of their results only, a bool for each result.
    """

    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    returns: bool
    gradients: Sequence[tuple[StateTensor, fx.Node]]
    left: Sequence[fx.Node] = ()
    masks: Mapping[fx.Node, Sequence[bool]] = field(default_factory=dict)


def backward_piece(joint: Joint, cut: BackwardCut, part: BackwardPart) -> Subgraph:
    """Build the graph of a part of a backward."""
    results = joint.input_grads if part.returns else ()
    sources = [joint.inputs[i] for i in joint.wanted_inputs] if part.returns else []
    gradients = [n for _, n in part.gradients]
    used = {cut.origin(s) for node in part.nodes for s in node.all_input_nodes}
    used.update(map(cut.origin, (*results, *gradients)))
    state = [(n, t) for n, t in joint.state if n in cut.looked_up and n in used]
    builder = SubgraphBuilder(joint.locations)
    for node in (*(n for n, _ in state), *part.inputs):
        if node in cut.narrow:
            builder.narrow_placeholder(node, NARROW)
        else:
            builder.placeholder(node)
    for node in part.nodes:
        for source in node.all_input_nodes:
            _provide(builder, cut, source)
        builder.copy(node)
        if node in part.masks:
            new = builder.of(node)
            new.args = (*new.args[:-1], list(part.masks[node]))
    for node in (*results, *gradients):
        _provide(builder, cut, node)
    memory = {memory_of(n) for n, _ in joint.state}
    returned, aliases = returned_values(builder, results, part.inputs, memory)
    aliases += sharing(part.left, part.inputs, len(returned))
    returned += [builder.of(n) for n in part.left]
    builder.graph.output((*returned, *(builder.of(n) for n in gradients)))
    cotangents = set(joint.cotangents)
    return Subgraph(
        nodes=Lazy.known(PieceNodes(builder.graph, joint.owner, builder.locations)),
        reads=tuple(t for _, t in state),
        takes=tuple(map(cut.type_of, part.inputs)),
        dense=tuple(n in cotangents for n in part.inputs),
        gives=(*(map(type_of, sources)), *map(type_of, part.left)),
        rebinds=(),
        gradients=gradients_of(
            part.gradients,
            [*results, *part.left],
            {memory_of(n) for n in part.inputs} | memory,
        ),
        aliases=aliases,
        draws=False,
        checks=has_checks(builder.graph),
    )


def _provide(builder: SubgraphBuilder, cut: BackwardCut, node: fx.Node) -> None:
    """Make a value available that the piece does not take or compute: a constant, or a view."""
    if builder.has(node):
        return
    if builder.is_narrow(node):
        builder.widen(node)
        return
    base = cut.base(node)
    if base is None:
        builder.copy(node)  # a constant; everything else is a placeholder
        return
    _provide(builder, cut, base)
    if written_in_place(node) is not None:
        builder.alias(node, base)
    else:
        builder.copy(node)
