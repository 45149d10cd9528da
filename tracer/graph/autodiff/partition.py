"""Cut a joint graph: into the forward alone, or into forward and backward with saved values.

The forward has the nodes that were traced before the backward began. `backward_cut.py` says which
of its values are saved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from torch import fx

from ....ir.types import TensorType
from ...lazy import Lazy
from ...method.joint_graph import Joint
from ...method.node_memory import memory_of, sharing
from ...method.reuse.saving_functions import OFFLOAD
from ...method.saving_marks import mark_of
from ...values.actor_state import StateTensor
from ...values.specs import ir_dtype
from .backward_cut import BackwardCut, BackwardPart, backward_piece
from .narrowing import NARROW, narrowable
from .recomputation import Recomputation, Recompute, Within, recomputed
from .split_backward import halve
from .subgraphs import (
    PieceNodes,
    Subgraph,
    SubgraphBuilder,
    fake_of,
    has_checks,
    live_nodes,
    returned_values,
    type_of,
)


class Section(Protocol):
    """A forward, a backward, or a half of one.

    Attributes:
        reads: the tensors of the state that it reads where they live.
        graded: the tensors to whose `.grad` it adds.
    """

    @property
    def reads(self) -> tuple[StateTensor, ...]: ...

    @property
    def graded(self) -> tuple[StateTensor, ...]: ...


AnySection = TypeVar("AnySection", bound=Section)


@dataclass(frozen=True)
class Sections(Generic[AnySection]):
    """A joint graph in sections.

    Attributes:
        forward: gives the outputs, then the saved values.
        backward: takes the saved values, then cotangents; gives cotangents of inputs.
        input: the half of the backward that an earlier stage waits for: takes what the backward
            takes, and gives its results, then the values that it leaves to `weight`.
        weight: the half that may be put off: takes the inputs that are kept, then the values that
            are left to it, and gives nothing. Without `input` it is all of the backward; None if
            nothing can be put off.
        kept: indices of those inputs of the backward that `weight` takes as well.
    """

    forward: AnySection
    backward: AnySection
    input: AnySection | None = None
    weight: AnySection | None = None
    kept: tuple[int, ...] = ()

    def changed(self, change: Callable[[AnySection], AnySection]) -> Sections[AnySection]:
        """The sections after a change of each of them."""
        early = None if self.input is None else change(self.input)
        late = None if self.weight is None else change(self.weight)
        return Sections(change(self.forward), change(self.backward), early, late, self.kept)


def split(
    joint: Joint, volatile: Collection[int] = (), recomputation: Recomputation = Recompute.NOTHING
) -> Sections[Subgraph]:
    """Cut a joint graph that was traced with a derivative.

    Args:
        joint, volatile, recomputation: as those of `recomputed`.
    """
    is_narrow = isinstance(recomputation, Within) and recomputation.narrows
    small = narrowable(joint) if is_narrow else frozenset()
    cut = BackwardCut(joint, volatile, recomputed(joint, volatile, recomputation), small)
    saved = tuple(n for n in joint.graph.nodes if n in cut.saved)
    whole = BackwardPart(
        cut.body, (*saved, *joint.cotangents), returns=True, gradients=joint.state_grads
    )
    backward = backward_piece(joint, cut, whole)
    marked = {cut.origin(n) for n in joint.graph.nodes if mark_of(n) == OFFLOAD}
    forward = replace(
        forward_piece(joint, saved, volatile, cut.narrow),
        offloads=tuple(i for i, n in enumerate(saved, len(joint.outputs)) if n in marked),
    )
    if not joint.wanted_inputs and backward.gradients:
        kept_indices = tuple(range(len(whole.inputs)))
        return Sections(forward, backward, weight=backward, kept=kept_indices)
    halves = halve(joint, cut, whole)
    return Sections(forward, backward, *halves) if halves else Sections(forward, backward)


def forward_piece(
    joint: Joint,
    saved: Sequence[fx.Node] = (),
    volatile: Collection[int] = (),
    narrow: Collection[fx.Node] = (),
) -> Subgraph:
    """The forward of a joint graph, with the values of `saved` behind its outputs.

    Args:
        joint: the joint graph.
        saved: nodes whose values are saved.
        volatile: indices of state that other calls change before the backward runs.
        narrow: those of `saved` that are saved in the type `NARROW`.
    """
    graph = joint.graph
    rebound = [node for _, node in joint.rebinds]
    live = live_nodes(graph, [*joint.outputs, *rebound, *saved])
    state = [(n, t) for n, t in joint.state if n in live]
    builder = SubgraphBuilder(joint.locations)
    for node in (*(n for n, _ in state), *joint.inputs):
        builder.placeholder(node)
    for node in graph.nodes:
        if node in live and node.name in joint.forward and not builder.has(node):
            builder.copy(node)
            if node in narrow:
                builder.narrow(node, NARROW)
    memory = {memory_of(n) for n, _ in joint.state}
    values, aliases = returned_values(builder, joint.outputs, joint.inputs, memory)
    changing = {memory_of(joint.nodes.value.state[i]) for i in (*joint.written, *volatile)}
    values += _saved(builder, saved, changing, narrow)
    values += _rebound(builder, joint)
    builder.graph.output(tuple(values))
    return Subgraph(
        nodes=Lazy.known(PieceNodes(builder.graph, joint.owner, builder.locations)),
        reads=tuple(t for _, t in state),
        takes=tuple(map(type_of, joint.inputs)),
        dense=(True,) * len(joint.inputs),
        gives=(*joint.results.types(), *(_saved_type(n, narrow) for n in saved)),
        rebinds=tuple(r.slot for r, _ in joint.rebinds),
        gradients=(),
        aliases=aliases + sharing(saved, joint.inputs, len(joint.outputs)),
        draws=joint.draws,
        checks=has_checks(builder.graph),
    )


def _saved_type(node: fx.Node, narrow: Collection[fx.Node]) -> TensorType:
    type_ = type_of(node)
    return replace(type_, dtype=ir_dtype(NARROW)) if node in narrow else type_


def _saved(
    builder: SubgraphBuilder,
    saved: Sequence[fx.Node],
    changing: set[int | None],
    narrow: Collection[fx.Node],
) -> list[fx.Node]:
    """Saved values. A value is copied if this call, or a later one, changes its memory."""
    copies = {n: builder.narrowed(n) for n in narrow}
    for node in saved:
        if node not in copies:
            is_copied = memory_of(node) in changing
            copies[node] = builder.clone(node, dense=False) if is_copied else builder.of(node)
    return [copies[node] for node in saved]


def _rebound(builder: SubgraphBuilder, joint: Joint) -> list[fx.Node]:
    """The new tensors of rebound slots, which are contiguous and share no memory."""
    return [
        builder.clone(node, dense=True)
        if rebind.shared or node.op == "get_attr" or not fake_of(node).is_contiguous()
        else builder.of(node)
        for rebind, node in joint.rebinds
    ]
