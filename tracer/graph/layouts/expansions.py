"""Trace the ops that an op is expanded to, and put them in its place."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ...method.purity.simplify import simplify
from .cases import Case, Expansion, Operand


def copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of a graph, whose constants have fakes, and the nodes of the copy by the originals."""
    copy = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = copy.node_copy(node, copies.__getitem__)
        if node.op == "get_attr" and "val" not in node.meta:
            copies[node].meta["val"] = _constant(graph, node)
    return copy, copies


def _constant(graph: fx.Graph, node: fx.Node) -> Any:
    """The fake of a constant; make_fx keeps none."""
    assert isinstance(node.target, str)
    value = operator.attrgetter(node.target)(graph.owning_module)
    mode = fake_mode_of(n.meta.get("val") for n in graph.nodes)
    return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value


def traced(case: Case, expansion: Expansion, results: Any) -> fx.Graph:
    """The graph of an expansion; its placeholders are the operands of the case.

    Args:
        case: the op.
        expansion: the function that replaces it.
        results: fakes of the op's results. The expansion may compute in other element types: its
            results are cast to those of the fakes.
    """
    fakes = [operand.node.meta["val"] for operand in case.operands]

    def function(*operands: torch.Tensor) -> Any:
        values = iter(operands)
        arguments = {name: _with_values(value, values) for name, value in case.arguments.items()}
        return _cast(expansion.function(**arguments), results)

    with torch.no_grad(), fake_mode_of(fakes):
        graph = make_fx(function, _allow_non_fake_inputs=False)(*fakes).graph
    simplify(graph)
    return graph


def _cast(value: Any, results: Any) -> Any:
    """A value with its tensors in the element types of `results`."""
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(*pair) for pair in zip(value, results, strict=True))
    if isinstance(value, torch.Tensor) and isinstance(results, torch.Tensor):
        return value.to(results.dtype)
    return value


def _with_values(argument: Any, values: Iterator[torch.Tensor]) -> Any:
    """An argument whose operands are replaced by the next values."""
    if isinstance(argument, Operand):
        return next(values)
    if isinstance(argument, (list, tuple)):
        return [_with_values(item, values) for item in argument]
    return argument


def fake_mode_of(values: Iterable[Any]) -> FakeTensorMode:
    """The mode in which fakes have been computed; a new one where there is none."""
    for value in values:
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return FakeTensorMode()


def replace_by(node: fx.Node, replacement: Any) -> dict[fx.Node, fx.Node]:
    """Let the users of a node use another node, or the items of a tuple of nodes.

    Args:
        node: the node; if it gives a tuple, its users are getitems, which are erased.
        replacement: the node, or tuple of nodes, that replaces it.

    Returns:
        The replacement of each node that is no longer used.
    """
    if isinstance(replacement, fx.Node):
        node.replace_all_uses_with(replacement)
        return {node: replacement}
    replaced = {}
    for user in list(node.users):
        assert user.target is operator.getitem
        index = user.args[1]
        assert isinstance(index, int)
        user.replace_all_uses_with(replacement[index])
        replaced[user] = replacement[index]
        user.graph.erase_node(user)
    return replaced
