"""Cut a backward in two: an earlier stage waits for one half; the other may be put off.

The first half computes the cotangents of inputs. The second computes the gradients of parameters,
and takes the values that both need from the first; nothing is computed twice. A convolution's
backward computes both kinds in one operator, whose mask says which results it computes: it goes
into both halves, each with its part of the mask. (A layer norm's backward could, too. But the
gradients of its weights cost little, and to put them off would keep large values alive.)

Sources: torchtitan's GraphPP and Meta's autoparallel reorder a backward graph in this way. Qi et
al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, use the halves.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from ...method.joint_graph import Joint
from ...method.node_memory import memory_of
from ...method.purity.simplify import reshapes_in_place
from ...values.operators import written_values
from .backward_cut import BackwardCut, BackwardPart, backward_piece
from .subgraphs import Subgraph, has_effect, is_view

_MASKED: frozenset[object] = frozenset({torch.ops.aten.convolution_backward.default})
"""Operators that compute each result by itself; their last argument is a mask of the results."""


def halve(
    joint: Joint, cut: BackwardCut, whole: BackwardPart
) -> tuple[Subgraph, Subgraph, tuple[int, ...]] | None:
    """Cut a backward in two; None if nothing of it can be put off.

    Args:
        joint: the joint graph.
        cut: the cut of the joint graph into forward and backward.
        whole: the contents of the backward.

    Returns:
        The two halves and the inputs that both take, as `Sections` has them.
    """
    halves = sides(joint, cut)
    if halves is None:
        return None
    first, second = halves
    sources = {s for node in second for s in node.all_input_nodes if s not in second}
    used = set(map(cut.origin, sources))
    kept_indices = tuple(i for i, node in enumerate(whole.inputs) if node in used)
    left = tuple(n for n in cut.body if n in first and n in used)
    early = BackwardPart(
        nodes=[n for n in cut.body if n in first],
        inputs=whole.inputs,
        returns=True,
        gradients=[(t, n) for t, n in joint.state_grads if n not in second],
        left=left,
        masks={n: _mask(n, first) for n in first & second},
    )
    late = BackwardPart(
        nodes=[n for n in cut.body if n in second],
        inputs=[*(whole.inputs[i] for i in kept_indices), *left],
        returns=False,
        gradients=[(t, n) for t, n in joint.state_grads if n in second],
        masks={n: _mask(n, second) for n in first & second},
    )
    return backward_piece(joint, cut, early), backward_piece(joint, cut, late), kept_indices


def _mask(node: fx.Node, side: set[fx.Node]) -> list[bool]:
    """Return the mask of a masked operator for a side: the results that nodes of the side use."""
    mask = node.args[-1]
    assert isinstance(mask, Sequence), "the last argument is the mask"
    used = {user.args[1] for user in node.users if user in side}
    return [bool(flag) and index in used for index, flag in enumerate(mask)]


def sides(joint: Joint, cut: BackwardCut) -> tuple[set[fx.Node], set[fx.Node]] | None:
    """The nodes of the first half and of the second; masked operators may be in both.

    None if the backward cannot be cut, or nothing of it can be put off.
    """
    results = joint.input_grads
    written = _written_memory(cut.body)
    if not results or written is None or reshapes_in_place(joint.graph):
        return None
    body = set(cut.body)
    first = _ancestors(results, body, set())
    _complete(cut.body, first, written)
    for _, node in joint.state_grads:
        first.update(_mere_views(node, body, first))
    roots = [n for _, n in joint.state_grads if n in body and n not in first]
    if not roots:
        return None
    roots += [n for n in cut.body if n not in first and has_effect(n)]
    return first, _ancestors(roots, body, first)


def _ancestors(roots: Iterable[fx.Node], body: set[fx.Node], stop: set[fx.Node]) -> set[fx.Node]:
    """The nodes of `body` that `roots` need, except those of `stop` that are not masked."""
    ancestors: set[fx.Node] = set()
    pending = [n for n in roots if n in body and n not in stop]
    while pending:
        node = pending.pop()
        if node in ancestors:
            continue
        ancestors.add(node)
        pending += [
            source
            for source in node.all_input_nodes
            if source in body and (source not in stop or source.target in _MASKED)
        ]
    return ancestors


def _complete(body: Sequence[fx.Node], first: set[fx.Node], written: set[int | None]) -> None:
    """Add the nodes to the first half that must not be in the second, which runs later.

    These are the `getitem` nodes of its operators. And if it touches memory that is written in
    place, these are the nodes that read or write the memory up to the last write.
    """
    size = -1
    while size != len(first):
        size = len(first)
        for node in body:
            if node.target is operator.getitem:
                source = node.args[0]
                if source in first and getattr(source, "target", None) not in _MASKED:
                    first.add(node)
        for memory in written:
            touching = [n for n in body if memory in map(memory_of, (n, *n.all_input_nodes))]
            last = max(i for i, n in enumerate(touching) if memory in _writes(n))
            if not first.isdisjoint(touching):
                first.update(_ancestors(touching[: last + 1], set(body), set()))


def _mere_views(node: fx.Node, body: set[fx.Node], first: set[fx.Node]) -> list[fx.Node]:
    """The views that give a gradient from a value of the first half; none if it takes more."""
    views = []
    while node in body and node not in first:
        base = node.args[0]
        if not is_view(node) or not isinstance(base, fx.Node):
            return []
        views.append(node)
        node = base
    return views


def _written_memory(body: Sequence[fx.Node]) -> set[int | None] | None:
    """The memory that nodes write to in place.

    None if some of it is not theirs, or if they have other effects.
    """
    written: set[int | None] = set()
    own: set[int | None] = set()
    for node in body:
        memory = memory_of(node)
        if memory not in map(memory_of, node.all_input_nodes):
            own.add(memory)
        if has_effect(node):
            writes = _writes(node)
            if not writes:
                return None
            written |= writes
    return written if written <= own - {None} else None


def _writes(node: fx.Node) -> set[int | None]:
    """The memory that an operator writes to in place."""
    values = written_values(node.target, node.args, node.kwargs)
    return {memory_of(value) for value in values if isinstance(value, fx.Node)}
