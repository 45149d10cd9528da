"""Cutting a joint graph: the forward alone, or forward and backward with saved values between.

The forward is what existed before the backward began. What the backward takes from it is saved,
with three refinements. A result of an operator with several results stays with its operator, so no
tuple is saved. A view is saved as its base, of which the backward takes the view again, so that no
memory counts twice. A parameter or buffer is not saved but looked up again, unless the forward has
changed it: then what it held after the forward is saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from .graphs import (
    Builder,
    Gradient,
    Piece,
    fake_of,
    is_view,
    live_nodes,
    memory_of,
    reshapes_in_place,
    returned_values,
    written_in_place,
)
from .joint import Joint


@dataclass(frozen=True)
class Split:
    """A joint graph in two pieces.

    Attributes:
        forward: gives the outputs, then the saved values.
        backward: takes the saved values, then cotangents; gives cotangents of inputs.
        saved: nodes of the joint graph whose values are saved.
    """

    forward: Piece
    backward: Piece
    saved: tuple[fx.Node, ...]


def split(joint: Joint) -> Split:
    """Cut a joint graph that was traced with a derivative."""
    cut = _Cut(joint)
    for node in cut.body:
        for source in node.all_input_nodes:
            cut.need(source)
    for node in cut.results():
        cut.need(node)
    saved = tuple(n for n in joint.owner.graph.nodes if n in cut.saved)
    return Split(forward_piece(joint, saved), _backward_piece(joint, cut, saved), saved)


def forward_piece(joint: Joint, saved: Sequence[fx.Node] = ()) -> Piece:
    """The forward of a joint graph, with the values of `saved` after its outputs."""
    graph = joint.owner.graph
    rebound = [node for _, node in joint.rebinds]
    live = live_nodes(graph, [*joint.outputs, *rebound, *saved])
    state = [(n, t) for n, t in joint.state if n in live]
    builder = Builder(joint.recorder.locations)
    for node in (*(n for n, _ in state), *joint.inputs):
        builder.placeholder(node)
    for node in graph.nodes:
        if node in live and node.name in joint.forward and not builder.has(node):
            builder.copy(node)
    memory = {memory_of(n) for n, _ in joint.state}
    values, aliases, references = returned_values(builder, joint.outputs, joint.inputs, memory)
    values += _saved(builder, joint, saved)
    values += _rebound(builder, joint)
    builder.graph.output(tuple(values))
    return Piece(
        graph=builder.graph,
        owner=joint.owner,
        state=tuple(t for _, t in state),
        inputs=len(joint.inputs),
        dense=(True,) * len(joint.inputs),
        returned=len(joint.outputs) + len(saved),
        rebinds=tuple(r.slot for r, _ in joint.rebinds),
        gradients=(),
        aliases=aliases + _saved_aliases(saved, joint),
        state_outputs=references,
        locations=builder.locations,
    )


def _saved(builder: Builder, joint: Joint, saved: Sequence[fx.Node]) -> list[fx.Node]:
    """Saved values; copies of what lies in state that this call, and the next one, change."""
    changing = {memory_of(joint.state[i][0]) for i in joint.written}
    return [
        builder.clone(n, dense=False) if memory_of(n) in changing else builder.of(n) for n in saved
    ]


def _saved_aliases(saved: Sequence[fx.Node], joint: Joint) -> tuple[tuple[int, int], ...]:
    first = len(joint.outputs)
    return tuple(
        (first + i, j)
        for i, value in enumerate(saved)
        for j, node in enumerate(joint.inputs)
        if memory_of(value) is not None and memory_of(value) == memory_of(node)
    )


def _rebound(builder: Builder, joint: Joint) -> list[fx.Node]:
    """The new tensors of rebound slots: contiguous, each with memory of its own."""
    return [
        builder.clone(node, dense=True)
        if rebind.shared or node.op == "get_attr" or not fake_of(node).is_contiguous()
        else builder.of(node)
        for rebind, node in joint.rebinds
    ]


class _Cut:
    """What the backward takes from the forward.

    Attributes:
        body: the nodes of the backward, in order.
        saved: values to be saved.
        looked_up: state that the backward reads where it lives.
    """

    def __init__(self, joint: Joint) -> None:
        self._joint = joint
        graph = joint.owner.graph
        live = live_nodes(graph, [*joint.outputs, *self.results()])
        inside = joint.forward | {n.name for n in joint.cotangents}
        self.body = [
            n for n in graph.nodes if n in live and n.op == "call_function" and n.name not in inside
        ]
        self.saved: set[fx.Node] = set()
        self.looked_up: set[fx.Node] = set()
        self._state = {n: i for i, (n, _) in enumerate(joint.state)}
        self._rebound = {id(r.tensor) for r, _ in joint.rebinds}
        self._views = not reshapes_in_place(graph)

    def results(self) -> list[fx.Node]:
        """The gradients that the backward computes."""
        joint = self._joint
        return [n for n in joint.input_grads if n is not None] + [n for _, n in joint.state_grads]

    def need(self, node: fx.Node) -> None:
        """Note that the backward uses a node."""
        if node.op == "get_attr" or node.name not in self._joint.forward:
            return
        if node in self._state:
            (self.saved if self._is_changed(node) else self.looked_up).add(node)
            return
        base = self.base(node)
        if base is None:
            self.saved.add(node)
        else:
            self.need(base)

    def base(self, node: fx.Node) -> fx.Node | None:
        """What to save instead of a node, if it can be had from that without computing."""
        if not self._views or node.op != "call_function":
            return None
        written = written_in_place(node)
        if written is not None:
            return written
        first = node.args[0] if node.args else None
        return first if is_view(node) and isinstance(first, fx.Node) else None

    def _is_changed(self, node: fx.Node) -> bool:
        index = self._state[node]
        if id(self._joint.state[index][1]) in self._rebound:
            return True
        return index in self._joint.written and index not in self._joint.backward_written


def _backward_piece(joint: Joint, cut: _Cut, saved: Sequence[fx.Node]) -> Piece:
    state = [(n, t) for n, t in joint.state if n in cut.looked_up]
    inputs = [*saved, *joint.cotangents]
    builder = Builder(joint.recorder.locations)
    for node in (*(n for n, _ in state), *inputs):
        builder.placeholder(node)
    for node in cut.body:
        for source in node.all_input_nodes:
            _provide(builder, cut, source)
        builder.copy(node)
    for node in cut.results():
        _provide(builder, cut, node)
    memory = {memory_of(n) for n, _ in joint.state}
    found = [n for n in joint.input_grads if n is not None]
    values, aliases, _ = returned_values(builder, found, inputs, memory)
    returned, aliases = _with_zeros(builder, joint, values, aliases)
    builder.graph.output((*returned, *(builder.of(n) for _, n in joint.state_grads)))
    return Piece(
        graph=builder.graph,
        owner=joint.owner,
        state=tuple(t for _, t in state),
        inputs=len(inputs),
        dense=(False,) * len(saved) + (True,) * len(joint.cotangents),
        returned=len(returned),
        rebinds=(),
        gradients=_gradients(joint, {memory_of(n) for n in inputs} | memory),
        aliases=aliases,
        state_outputs=(),
        locations=builder.locations,
    )


def _provide(builder: Builder, cut: _Cut, node: fx.Node) -> None:
    """Make a forward value available in the backward: a constant, or a view taken again."""
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


def _with_zeros(
    builder: Builder,
    joint: Joint,
    values: Sequence[fx.Node],
    aliases: tuple[tuple[int, int], ...],
) -> tuple[list[fx.Node], tuple[tuple[int, int], ...]]:
    """Fill in zeros for the inputs that no output depends on."""
    supply = iter(values)
    position: list[int] = []
    returned: list[fx.Node] = []
    for index, node in zip(joint.wanted_inputs, joint.input_grads, strict=True):
        if node is None:
            returned.append(builder.zeros(joint.inputs[index]))
        else:
            position.append(len(returned))
            returned.append(next(supply))
    return returned, tuple((position[i], j) for i, j in aliases)


def _gradients(joint: Joint, elsewhere: set[int | None]) -> tuple[Gradient, ...]:
    """The gradients of the state; those whose memory nobody else refers to are owned."""
    results = [n for n in joint.input_grads if n is not None] + [n for _, n in joint.state_grads]
    uses = Counter(map(memory_of, results))
    return tuple(
        Gradient(
            tensor,
            owned=node.op == "call_function"
            and uses[memory_of(node)] == 1
            and memory_of(node) not in elsewhere,
        )
        for tensor, node in joint.state_grads
    )
