"""Cut a joint graph: into the forward alone, or into forward and backward with saved values.

The forward has the nodes that were traced before the backward began. `backward_cut.py` says which
of its values are saved.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx

from ...method.joint import Joint
from .backward_cut import BackwardCut, BackwardPart, backward_piece
from .recomputation import Recompute, recomputed
from .split_backward import SplitBackward, halve
from .subgraphs import (
    Subgraph,
    SubgraphBuilder,
    fake_of,
    live_nodes,
    memory_of,
    returned_values,
    sharing,
)


@dataclass(frozen=True)
class Split:
    """A joint graph in two pieces.

    Attributes:
        forward: gives the outputs, then the saved values.
        backward: takes the saved values, then cotangents; gives cotangents of inputs.
        saved: nodes of the joint graph whose values are saved.
        halves: the backward again, in two pieces; None if nothing of it can be put off.
    """

    forward: Subgraph
    backward: Subgraph
    saved: tuple[fx.Node, ...]
    halves: SplitBackward | None


def split(
    joint: Joint, volatile: Collection[int] = (), what: Recompute = Recompute.NOTHING
) -> Split:
    """Cut a joint graph that was traced with a derivative.

    Args:
        joint, volatile, what: as those of `recomputed`.
    """
    cut = BackwardCut(joint, volatile, recomputed(joint, volatile, what))
    saved = tuple(n for n in joint.graph.nodes if n in cut.saved)
    whole = BackwardPart(
        cut.body, (*saved, *joint.cotangents), returns=True, gradients=joint.state_grads
    )
    backward = backward_piece(joint, cut, whole)
    halves = halve(joint, cut, whole, backward)
    return Split(forward_piece(joint, saved, volatile), backward, saved, halves)


def forward_piece(
    joint: Joint, saved: Sequence[fx.Node] = (), volatile: Collection[int] = ()
) -> Subgraph:
    """The forward of a joint graph, with the values of `saved` behind its outputs.

    Args:
        joint: the joint graph.
        saved: nodes whose values are saved.
        volatile: indices of state that other calls change before the backward runs.
    """
    graph = joint.graph
    rebound = [node for _, node in joint.rebinds]
    live = live_nodes(graph, [*joint.outputs, *rebound, *saved])
    state = [(n, t) for n, t in joint.state if n in live]
    builder = SubgraphBuilder(joint.recorder.locations)
    for node in (*(n for n, _ in state), *joint.inputs):
        builder.placeholder(node)
    for node in graph.nodes:
        if node in live and node.name in joint.forward and not builder.has(node):
            builder.copy(node)
    memory = {memory_of(n) for n, _ in joint.state}
    values, aliases, references = returned_values(builder, joint.outputs, joint.inputs, memory)
    changing = {memory_of(joint.state[i][0]) for i in (*joint.written, *volatile)}
    values += _saved(builder, saved, changing)
    values += _rebound(builder, joint)
    builder.graph.output(tuple(values))
    return Subgraph(
        graph=builder.graph,
        owner=joint.owner,
        state=tuple(t for _, t in state),
        inputs=len(joint.inputs),
        dense=(True,) * len(joint.inputs),
        returned=len(joint.outputs) + len(saved),
        rebinds=tuple(r.slot for r, _ in joint.rebinds),
        gradients=(),
        aliases=aliases + sharing(saved, joint.inputs, len(joint.outputs)),
        state_outputs=references,
        locations=builder.locations,
    )


def _saved(
    builder: SubgraphBuilder, saved: Sequence[fx.Node], changing: set[int | None]
) -> list[fx.Node]:
    """Saved values. A value is copied if this call, or a later one, changes its memory."""
    return [
        builder.clone(n, dense=False) if memory_of(n) in changing else builder.of(n) for n in saved
    ]


def _rebound(builder: SubgraphBuilder, joint: Joint) -> list[fx.Node]:
    """The new tensors of rebound slots, which are contiguous and share no memory."""
    return [
        builder.clone(node, dense=True)
        if rebind.shared or node.op == "get_attr" or not fake_of(node).is_contiguous()
        else builder.of(node)
        for rebind, node in joint.rebinds
    ]
