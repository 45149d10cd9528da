"""Choose the values of the forward that a backward computes again, instead of saving them.

A fused kernel that reads a value can compute a cast or a product of it on the way, for nothing. To
write such a result in the forward, hold it and read it again costs more. The choice is a minimum
cut between the values that have to be kept and those that the backward needs, weighed by bytes.
torch's own partitioner makes the cut, with the rules of `torch.compile`.

Source: He and Yu, Transcending Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware,
MLSys 2023.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ....ir.pipeline.tradeoff import Tradeoff
from ...errors import TraceError
from ...method.joint_graph import Joint
from ...method.node_memory import memory_of
from ...method.reuse.saving_functions import RECOMPUTE, SAVED
from ...method.saving_marks import mark_of
from ...values.interface import MethodTarget, Target, TracedCall, Write
from ...values.operators import is_random, storage_key, written_values
from .backward_cut import BackwardCut
from .saved_tensors import SavingLimits, Savings
from .subgraphs import fake_of, has_effect, is_view, written_in_place


class Recompute(Enum):
    """The operators of the forward that a backward computes again."""

    NOTHING = "nothing"
    CHEAP = "cheap"
    """Operators that fused kernels compute on the way, if fewer bytes are kept then. Operators that
    draw random numbers, write in place, communicate or multiply matrices are not among them."""
    ALL = "all"
    """All operators but those that draw random numbers: inputs are kept, and what is drawn."""


@dataclass(frozen=True)
class Within:
    """As many operators as a limit on the bytes that a forward saves makes necessary.

    Attributes:
        plain: what is computed again without a limit.
        limit: the most bytes to save; None: any number.
        limits: knows the choices of joint graphs.
        narrows: whether values are saved in a smaller type, where they can be.
    """

    plain: Recompute
    limit: int | None
    limits: SavingLimits = field(compare=False)
    narrows: bool = False

    def savings(self, joint: Joint, volatile: Collection[int]) -> Savings:
        """The choices of a joint graph; what fused kernels run on the way costs nothing."""
        free = recomputed(joint, volatile, self.plain) if self.plain is Recompute.CHEAP else ()
        return self.limits.savings(joint, frozenset(volatile), frozenset(free))

    def tradeoff(self, joint: Joint, volatile: Collection[int]) -> Tradeoff:
        """The bytes that may be saved of a joint graph's forward, against work."""
        return self.savings(joint, volatile).tradeoff


Recomputation: TypeAlias = Recompute | Within
"""The operators of the forward that a backward computes again."""


def what_again(
    target: Target,
    fused: bool,
    between: Sequence[Write],
    limits: SavingLimits | None = None,
    name: str = "",
) -> Recomputation:
    """The operators that the backward of a call computes again.

    If a call in between may change the actor, the backward reads no more state than it must, so it
    computes nothing again that the user has not asked for.

    Args:
        target: the target of the call.
        fused: whether the kernels of methods are fused.
        between: the calls between forward and backward that may change the actor.
        limits: the limits of what forwards save; None: there are none.
        name: the name of the derivative.
    """
    if target.remat:
        return Recompute.ALL
    if not isinstance(target, MethodTarget) or between:
        return Recompute.NOTHING
    plain = Recompute.CHEAP if fused else Recompute.NOTHING
    if limits is None:
        return plain
    return Within(plain, limits.limits.get(name), limits, limits.narrows)


def refuse_twice(call: TracedCall, joint: Joint) -> None:
    """Refuse to compute all of a call again if the second time would differ from the first.

    Raises:
        TraceError: the call changes its actor.
    """
    if joint.written or joint.rebound:
        raise TraceError(
            f"{call.shown} cannot be computed again in the backward: it changes the actor's state, "
            "which would happen twice",
            loc=call.loc,
            remedy="call it without cg.remat, or move that part into a method of its own",
        )


def recomputed(
    joint: Joint, volatile: Collection[int], recomputation: Recomputation
) -> frozenset[fx.Node]:
    """The operators of the forward that the backward computes again.

    Args:
        joint: a joint graph that was traced with a derivative.
        volatile: as for `BackwardCut`.
        recomputation: how much to compute again, beside what the user has marked.

    Raises:
        TraceError: the user has marked what must not be computed again.
    """
    if not joint.cotangents:
        return frozenset()
    if isinstance(recomputation, Within):
        if recomputation.limit is not None:
            return recomputation.savings(joint, volatile).again(recomputation.limit)
        recomputation = recomputation.plain
    marks = {mark_of(node) for node in joint.graph.nodes}
    chosen = _chosen(joint, volatile, recomputation)
    if RECOMPUTE in marks:
        chosen |= Savings(joint, volatile).again(None)
    return chosen - _kept(joint) if SAVED & marks else chosen


def _chosen(joint: Joint, volatile: Collection[int], recompute: Recompute) -> frozenset[fx.Node]:
    """The operators that are computed again if the user marks none."""
    if recompute is Recompute.NOTHING:
        return frozenset()
    forward = [n for n in joint.graph.nodes if n.op == "call_function" and n.name in joint.forward]
    if recompute is Recompute.ALL:
        return frozenset(forward) - _drawn(forward)
    plain = BackwardCut(joint, volatile)
    free = [i for i, (node, _) in enumerate(joint.state) if not plain.is_changed(node)]
    fixed = _fixed(joint)
    again = _by_torch(joint, free, fixed)
    chosen = frozenset(n for n in forward if n in again and n not in fixed)
    less = kept_bytes(BackwardCut(joint, volatile, chosen)) < kept_bytes(plain)
    return chosen if less else frozenset()


def _kept(joint: Joint) -> set[fx.Node]:
    """The operators that give memory of values that the user keeps."""
    kept = {memory_of(node) for node in joint.graph.nodes if mark_of(node) in SAVED} - {None}
    return {node for node in joint.graph.nodes if _memory_given(node) & kept}


def kept_bytes(cut: BackwardCut) -> int:
    """The bytes that a forward saves for its backward; state does not count, it lives anyway."""
    return sum(fake_of(node).nbytes for node in cut.saved)


def _fixed(joint: Joint) -> set[fx.Node]:
    """The operators that must not be computed again.

    They have an effect, or read or give memory that some operator writes to: its contents may
    differ by the time of the backward.
    """
    nodes = [n for n in joint.graph.nodes if n.op == "call_function"]
    written = {
        memory_of(value)
        for node in nodes
        for value in written_values(node.target, node.args, node.kwargs)
        if isinstance(value, fx.Node)
    } - {None}
    return {
        node
        for node in nodes
        if has_effect(node)
        or any(memory_of(operand) in written for operand in (node, *node.all_input_nodes))
    }


def _drawn(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The operators that draw, and those that share memory with what is drawn.

    Drawn numbers may be copied before they are used, or changed in place; their last value is kept.
    So an operator that reads it before the last change must not be computed again either.
    """
    last: dict[int | None, int] = {}
    for index, node in enumerate(nodes):
        for value in written_values(node.target, node.args, node.kwargs):
            if isinstance(value, fx.Node):
                last[memory_of(value)] = index
    memory: set[int | None] = set()
    before = -1
    while before < len(memory):
        before = len(memory)
        for index, node in enumerate(nodes):
            read = {memory_of(operand) for operand in node.all_input_nodes} & memory
            late = any(last.get(key, 0) > index for key in read)
            copies = bool(read) and written_in_place(node) is not None
            if late or copies or is_random(node.target, node.args, node.kwargs):
                memory |= _memory_given(node)
    return {node for node in nodes if _memory_given(node) & memory}


def _memory_given(node: fx.Node) -> set[int | None]:
    """The memory of all tensors that an operator gives."""
    values = node.meta.get("val")
    values = values if isinstance(values, (tuple, list)) else (values,)
    return {storage_key(v) for v in values if isinstance(v, torch.Tensor)} - {None}


def _by_torch(joint: Joint, free: list[int], fixed: set[fx.Node]) -> set[fx.Node]:
    """The operators of the joint graph that torch's partitioner puts into the backward.

    Args:
        joint: the joint graph.
        free: indices of state that costs nothing to keep.
        fixed: operators that must not be computed again.
    """
    functorch = importlib.import_module("functorch.compile")  # it takes a second to import
    graph, copies = _as_torch_has_it(joint, fixed)
    ahead = len(joint.outputs) + len(joint.rebinds)
    # Nodes keep their names, and a user's settings for torch.compile change no plan.
    with functorch.config.patch(cse=False, activation_memory_budget=1.0):
        _, backward = functorch.min_cut_rematerialization_partition(
            fx.GraphModule(joint.owner, graph),
            None,
            num_fwd_outputs=ahead,
            static_lifetime_input_indices=free,
        )
    names = {node.name for node in backward.graph.nodes if node.op == "call_function"}
    return {node for node, copy in copies.items() if copy.name in names}


def _as_torch_has_it(joint: Joint, fixed: set[fx.Node]) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of the joint graph in AOTAutograd's form, and the copy of each node.

    Placeholders are primals, then tangents. Equal views become one node, since the partitioner
    would count the bytes of each.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for kind, nodes in (
        ("primals", [*(n for n, _ in joint.state), *joint.inputs]),
        ("tangents", joint.cotangents),
    ):
        for index, node in enumerate(nodes, 1):
            copies[node] = graph.placeholder(f"{kind}_{index}")
            copies[node].meta = dict(node.meta)
    views: dict[Any, fx.Node] = {}
    for node in joint.graph.nodes:
        if node in copies or node.op == "output":
            continue
        new = graph.node_copy(node, copies.__getitem__)
        new.meta = dict(node.meta)
        if node in fixed:
            new.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        copies[node] = new
        if is_view(node) and node not in fixed:
            same = views.setdefault((new.target, repr(new.args)), new)
            if same is not new:
                graph.erase_node(new)
                copies[node] = same
    ends = [*joint.outputs, *(n for _, n in joint.rebinds), *joint.input_grads]
    ends += [n for _, n in joint.state_grads]
    graph.output(tuple(copies[n] for n in ends))
    return graph, copies
