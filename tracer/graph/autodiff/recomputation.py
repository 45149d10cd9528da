"""Choose what a backward computes again of its forward, instead of taking it as a saved value.

A fused kernel that reads a value can compute a cast or a product of it on the way, for nothing: to
write such a result in the forward, to hold it and to read it costs more. Which of them to compute
again is a minimum cut between what has to be kept and what the backward needs, weighed by bytes.
torch's own partitioner makes it, with the rules that `torch.compile` goes by.

Source: He and Yu, Transcending Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware,
MLSys 2023.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from enum import Enum
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ...errors import TraceError
from ...method.joint import Joint
from ...values.interface import Call, MethodTarget, Target, Write
from ...values.operators import (
    written_values,
)
from .backward import Cut
from .subgraphs import fake_of, has_effect, is_view, memory_of


class Recompute(Enum):
    """What a backward computes again of its forward."""

    NOTHING = "nothing"
    CHEAP = "cheap"
    """What fused kernels compute on the way, where less is kept by it. Never what draws random
    numbers, writes in place, exchanges something or multiplies matrices."""
    ALL = "all"
    """Everything: nothing but inputs is kept."""


def what_again(target: Target, fused: bool, between: Sequence[Write]) -> Recompute:
    """What the backward of a call computes again.

    Where a call in between may change the actor, the backward reads no more of it than it must.

    Args:
        target: what is called.
        fused: whether kernels are fused, if it is a method.
        between: the calls in between.
    """
    if target.remat:
        return Recompute.ALL
    is_cheap = fused and isinstance(target, MethodTarget) and not between
    return Recompute.CHEAP if is_cheap else Recompute.NOTHING


def refuse_twice(call: Call, joint: Joint) -> None:
    """Refuse to compute all of a call again in the backward that is not the same then.

    Raises:
        TraceError: it draws random numbers, or changes its actor.
    """
    if joint.recorder.draws:
        does = "draws random numbers, which would not be the same again"
    elif joint.written or joint.rebinds:
        does = "changes the actor's state, which would happen twice"
    else:
        return
    raise TraceError(
        f"{call.what} cannot be computed again in the backward: it {does}",
        loc=call.loc,
        remedy="call it without cg.remat, or move that part into a method of its own",
    )


def recomputed(joint: Joint, volatile: Collection[int], what: Recompute) -> frozenset[fx.Node]:
    """The operators of the forward that the backward computes again.

    Args:
        joint: a joint graph that was traced with a derivative.
        volatile: as for `Cut`.
        what: which of them.
    """
    if what is Recompute.NOTHING or not joint.cotangents:
        return frozenset()
    forward = [n for n in joint.graph.nodes if n.op == "call_function" and n.name in joint.forward]
    if what is Recompute.ALL:
        return frozenset(forward)
    plain = Cut(joint, volatile)
    free = [i for i, (node, _) in enumerate(joint.state) if not plain.is_changed(node)]
    fixed = _fixed(joint)
    again = _by_torch(joint, free, fixed)
    chosen = frozenset(n for n in forward if n in again and n not in fixed)
    less = kept_bytes(Cut(joint, volatile, chosen)) < kept_bytes(plain)
    return chosen if less else frozenset()


def kept_bytes(cut: Cut) -> int:
    """The bytes of what a forward keeps for its backward, but for state that lives anyway."""
    return sum(fake_of(node).nbytes for node in cut.saved)


def _fixed(joint: Joint) -> set[fx.Node]:
    """The operators that would not give the same again, or do something besides.

    What lies in memory that anything writes to may be another value by the time of the backward.
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


def _by_torch(joint: Joint, free: list[int], fixed: set[fx.Node]) -> set[fx.Node]:
    """The operators that torch's partitioner has the backward compute, of the whole joint graph.

    Args:
        free: indices of state, which costs nothing to keep.
        fixed: what must not be computed again.
    """
    functorch = importlib.import_module("functorch.compile")  # it takes a second to import
    graph, copies = _as_torch_has_it(joint, fixed)
    ahead = len(joint.outputs) + len(joint.rebinds)
    # Nodes keep their names, and what a user has set for torch.compile changes no plan of cg's.
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
    """A copy of the joint graph as AOTAutograd makes them, and its nodes by those of the graph.

    Placeholders are primals, then tangents. Equal views are one, since each of them counts.
    """
    graph = fx.Graph(joint.owner)
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
