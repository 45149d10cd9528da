"""Take a backward, or a part of one, out of a joint graph, with what it takes from the forward.

What the backward takes is saved, with three refinements. A result of an operator with several
results stays with its operator, so no tuple is saved. A view is saved as its base, of which the
backward takes the view again, so that no memory counts twice. A parameter or buffer is not saved
but looked up again, unless it changes before the backward runs: then what it held is saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from ...method.joint import Joint
from ...method.purity.simplify import (
    reshapes_in_place,
)
from ...values.actor_state import StateTensor
from .subgraphs import (
    Builder,
    Gradient,
    Piece,
    has_effect,
    is_view,
    memory_of,
    returned_values,
    sharing,
    written_in_place,
)


class Cut:
    """Nodes of the backward, and what they take from the forward.

    Args:
        joint: a joint graph that was traced with a derivative.
        volatile: indices of state that other calls change before the backward runs.
        recomputed: operators of the forward that the backward computes again, where it needs
            them, instead of taking what they give.

    Attributes:
        body: the nodes of the backward, in order; those that are computed again right before what
            needs them first, where nothing is written in place.
        saved: values to be saved.
        looked_up: state that the backward reads where it lives.
    """

    def __init__(
        self,
        joint: Joint,
        volatile: Collection[int] = (),
        recomputed: Collection[fx.Node] = (),
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

    def results(self) -> list[fx.Node]:
        """The gradients that the backward computes."""
        joint = self._joint
        return [*joint.input_grads, *(n for _, n in joint.state_grads)]

    def _needed(self) -> list[fx.Node]:
        """What the results need, and all that has an effect, but for what the forward gives."""
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
        """Return what to save instead of a node, if the node is a view of that."""
        if not self._views or node.op != "call_function":
            return None
        written = written_in_place(node)
        if written is not None:
            return written
        first = node.args[0] if node.args else None
        return first if is_view(node) and isinstance(first, fx.Node) else None

    def origin(self, node: fx.Node) -> fx.Node:
        """Return what a node is a view of, or the node itself."""
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
        if node in self._state and not self.is_changed(node):
            self.looked_up.add(node)
        else:
            self.saved.add(node)

    def is_changed(self, node: fx.Node) -> bool:
        """True if state is another by the time of the backward than the forward has seen."""
        joint, index = self._joint, self._state[node]
        if index in self._volatile or id(joint.state[index][1]) in self._rebound:
            return True
        return index in joint.written and index not in joint.backward_written


def _late(body: Sequence[fx.Node], forward: Collection[str]) -> list[fx.Node]:
    """The body, in which each node of the forward stands right before what needs it first."""
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
class Part:
    """Contents of a piece of a backward. Nodes are those of the joint graph.

    Attributes:
        nodes: the operators, in order.
        inputs: what it takes: saved values, cotangents, values that another part leaves to it.
        returns: whether it returns the cotangents of inputs.
        gradients: the gradients of state that it computes.
        left: values that it returns for another part, after cotangents.
        masks: for operators that compute only some of their results, which.
    """

    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    returns: bool
    gradients: Sequence[tuple[StateTensor, fx.Node]]
    left: Sequence[fx.Node] = ()
    masks: Mapping[fx.Node, Sequence[bool]] = field(default_factory=dict)


def backward_piece(joint: Joint, cut: Cut, part: Part) -> Piece:
    """Build a part of a backward."""
    results = joint.input_grads if part.returns else ()
    gradients = [n for _, n in part.gradients]
    used = {cut.origin(s) for node in part.nodes for s in node.all_input_nodes}
    used.update(map(cut.origin, (*results, *gradients)))
    state = [(n, t) for n, t in joint.state if n in cut.looked_up and n in used]
    builder = Builder(joint.recorder.locations)
    for node in (*(n for n, _ in state), *part.inputs):
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
    returned, aliases, _ = returned_values(builder, results, part.inputs, memory)
    aliases += sharing(part.left, part.inputs, len(returned))
    returned += [builder.of(n) for n in part.left]
    builder.graph.output((*returned, *(builder.of(n) for n in gradients)))
    cotangents = set(joint.cotangents)
    return Piece(
        graph=builder.graph,
        owner=joint.owner,
        state=tuple(t for _, t in state),
        inputs=len(part.inputs),
        dense=tuple(n in cotangents for n in part.inputs),
        returned=len(returned),
        rebinds=(),
        gradients=_gradients(
            part.gradients,
            [*results, *gradients, *part.left],
            {memory_of(n) for n in part.inputs} | memory,
        ),
        aliases=aliases,
        state_outputs=(),
        locations=builder.locations,
    )


def _provide(builder: Builder, cut: Cut, node: fx.Node) -> None:
    """Make a value of elsewhere available: a constant, or a view taken again."""
    if builder.has(node):
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


def _gradients(
    gradients: Iterable[tuple[StateTensor, fx.Node]],
    results: Iterable[fx.Node],
    elsewhere: set[int | None],
) -> tuple[Gradient, ...]:
    """The gradients of the state; those whose memory nobody else refers to are owned."""
    uses = Counter(map(memory_of, results))
    return tuple(
        Gradient(
            tensor,
            owned=node.op == "call_function"
            and uses[memory_of(node)] == 1
            and memory_of(node) not in elsewhere,
        )
        for tensor, node in gradients
    )
