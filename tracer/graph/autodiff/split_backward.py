"""Cut a backward in two: what an earlier stage waits for, and what may be put off.

The first half holds whatever the cotangents of inputs need. The second holds the rest of what the
gradients of parameters need, and takes what it has in common with the first from that; nothing is
computed twice. A convolution's backward computes both kinds in one operator, by a mask that says
which: it goes into both halves, each with its part of the mask. (A layer norm's could, too; but
the gradients of its weights cost little, and putting them off would keep large values alive.)

Source: reordering a backward graph as torchtitan's GraphPP and Meta's autoparallel do; what the
halves are for: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ...method.joint import Joint
from ...method.purity.simplify import (
    reshapes_in_place,
)
from ...values.operators import (
    written_values,
)
from .backward import Cut, Part, backward_piece
from .subgraphs import (
    Piece,
    has_effect,
    is_view,
    memory_of,
)

_MASKED: frozenset[object] = frozenset({torch.ops.aten.convolution_backward.default})
"""Operators that compute their results independently, by a mask that is their last argument."""


@dataclass(frozen=True)
class SplitBackward:
    """A backward in two pieces.

    Attributes:
        input: takes what the backward takes; gives its results, then what it leaves to `weight`.
            None if the backward has no results: `weight` is then all of it.
        weight: takes what is kept, then what is left to it; gives nothing.
        kept: indices of inputs of the backward.
        left: nodes of the joint graph whose values are left to `weight`.
    """

    input: Piece | None
    weight: Piece
    kept: tuple[int, ...]
    left: tuple[fx.Node, ...]


def halve(joint: Joint, cut: Cut, whole: Part, backward: Piece) -> SplitBackward | None:
    """Cut a backward in two; None if nothing of it can be put off.

    Args:
        joint: the graph that it is part of.
        cut: where that is cut.
        whole: what the backward holds.
        backward: the backward.
    """
    if not joint.wanted_inputs:
        kept_indices = tuple(range(backward.inputs))
        return SplitBackward(None, backward, kept_indices, ()) if backward.gradients else None
    halves = sides(joint, cut)
    if halves is None:
        return None
    first, second = halves
    sources = {s for node in second for s in node.all_input_nodes if s not in second}
    used = set(map(cut.origin, sources))
    kept_indices = tuple(i for i, node in enumerate(whole.inputs) if node in used)
    left = tuple(n for n in cut.body if n in first and n in used)
    early = Part(
        nodes=[n for n in cut.body if n in first],
        inputs=whole.inputs,
        returns=True,
        gradients=[(t, n) for t, n in joint.state_grads if n not in second],
        left=left,
        masks={n: _mask(n, first) for n in first & second},
    )
    late = Part(
        nodes=[n for n in cut.body if n in second],
        inputs=[*(whole.inputs[i] for i in kept_indices), *left],
        returns=False,
        gradients=[(t, n) for t, n in joint.state_grads if n in second],
        masks={n: _mask(n, second) for n in first & second},
    )
    return SplitBackward(
        backward_piece(joint, cut, early), backward_piece(joint, cut, late), kept_indices, left
    )


def _mask(node: fx.Node, side: set[fx.Node]) -> list[bool]:
    """Return the results of a masked operator that are used on a side."""
    mask = node.args[-1]
    assert isinstance(mask, Sequence), "the last argument is the mask"
    used = {user.args[1] for user in node.users if user in side}
    return [bool(flag) and index in used for index, flag in enumerate(mask)]


def sides(joint: Joint, cut: Cut) -> tuple[set[fx.Node], set[fx.Node]] | None:
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
    """Return what `roots` need of `body`, less `stop` but for masked operators."""
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
    """Add to the first half what must not be parted from it.

    These are results of its operators, and what reads or writes the same memory before it is
    written to for the last time: the second half runs later.
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
    """The views by which a gradient follows from the first half alone; none if it does not."""
    views = []
    while node in body and node not in first:
        base = node.args[0]
        if not is_view(node) or not isinstance(base, fx.Node):
            return []
        views.append(node)
        node = base
    return views


def _written_memory(body: Sequence[fx.Node]) -> set[int | None] | None:
    """Return what the nodes write to in place; None if it is not all theirs, or they do more."""
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
