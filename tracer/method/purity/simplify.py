"""Remove from a traced graph what does nothing at run time."""

from __future__ import annotations

import torch
from torch import fx

from ...values.operators import argument_of

_ATEN = torch.ops.aten
_SAME = (_ATEN.alias.default, _ATEN.detach.default)
_TRANSPOSES = (_ATEN.t.default, _ATEN.transpose.int)
_RESHAPING_IN_PLACE = frozenset(
    {
        *("as_strided_", "detach_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_"),
        *("swapdims_", "t_", "transpose_", "unsqueeze_"),
    }
)


def simplify(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Remove in place what does nothing at run time: `detach`, `alias`, and double transposes.

    They stay where the graph changes shape or strides of a tensor in place, since then the two
    sides of an alias differ.

    Returns:
        The replacement of each node that is removed.
    """
    replaced: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if _name(node.target).endswith("batch_norm_backward"):
            _drop_running_statistics(node)
    if reshapes_in_place(graph):
        return replaced
    for node in list(graph.nodes):
        same = node.args[0] if node.target in _SAME else _transposed_twice(node)
        if isinstance(same, fx.Node):
            node.replace_all_uses_with(same)
            graph.erase_node(node)
            replaced[node] = same
    return replaced


def _transposed_twice(node: fx.Node) -> object:
    """Return the tensor that a node transposes a second time; None if it does no such thing."""
    inner = node.args[0] if node.target in _TRANSPOSES else None
    if isinstance(inner, fx.Node) and inner.target is node.target:
        return inner.args[0] if inner.args[1:] == node.args[1:] else None
    return None


def reshapes_in_place(graph: fx.Graph) -> bool:
    """True if an operator changes the shape or strides of a tensor in place."""
    return any(_name(node.target) in _RESHAPING_IN_PLACE for node in graph.nodes)


def _name(target: object) -> str:
    if not isinstance(target, torch._ops.OpOverload):
        return ""
    return target._schema.name.partition("::")[2]


def _drop_running_statistics(node: fx.Node) -> None:
    """Give a batch norm's backward no running statistics in training, where it ignores them.

    Otherwise it would seem to read a buffer that the forward writes to.
    """
    assert isinstance(node.target, torch._ops.OpOverload)
    if argument_of(node.target, node.args, node.kwargs, "train") is False:
        return
    names = [a.name for a in node.target._schema.arguments]
    args = list(node.args)
    for name in ("running_mean", "running_var"):
        if name in names:
            args[names.index(name)] = None
    node.args = tuple(args)
