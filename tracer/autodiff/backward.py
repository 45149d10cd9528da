"""Building the graph of a backward, or of a part of one, from a joint graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from ..actors.actor_state import StateTensor
from ..methods.joint import Joint
from .cut import Cut
from .subgraphs import Builder, Gradient, Piece, memory_of, returned_values, written_in_place


@dataclass(frozen=True)
class Part:
    """What a piece of a backward is to hold. Nodes are those of the joint graph.

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


def whole_backward(joint: Joint, cut: Cut, saved: Sequence[fx.Node]) -> Part:
    """All of a backward: takes the saved values, then cotangents."""
    return Part(cut.body, (*saved, *joint.cotangents), True, joint.state_grads)


def backward_piece(joint: Joint, cut: Cut, part: Part) -> Piece:
    """Build a part of a backward."""
    results = [n for n in joint.input_grads if n is not None] if part.returns else []
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
    values, aliases, _ = returned_values(builder, results, part.inputs, memory)
    returned, aliases = _with_zeros(builder, joint, values, aliases) if part.returns else ([], ())
    aliases += _aliases(part.left, part.inputs, len(returned))
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


def _aliases(
    values: Iterable[fx.Node], inputs: Sequence[fx.Node], first: int
) -> tuple[tuple[int, int], ...]:
    """Which values share memory with which inputs; values are numbered from `first`."""
    return tuple(
        (first + i, j)
        for i, value in enumerate(values)
        for j, node in enumerate(inputs)
        if memory_of(value) is not None and memory_of(value) == memory_of(node)
    )


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
