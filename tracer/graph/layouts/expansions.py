"""Trace what an op is expanded to, and put it in the place of the op."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ...method.purity.simplify import (
    simplify,
)
from .cases import Case, Expansion, Operand


def constant_of(graph: fx.Graph, node: fx.Node) -> Any:
    """The fake of a constant, for which make_fx keeps none."""
    assert isinstance(node.target, str)
    value = operator.attrgetter(node.target)(graph.owning_module)
    mode = fake_mode_of(n.meta.get("val") for n in graph.nodes)
    return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value


def traced(case: Case, expansion: Expansion, results: Any) -> fx.Graph:
    """The graph of an expansion; its placeholders are the operands of the case.

    Args:
        case: the op.
        expansion: what it is replaced by.
        results: fakes of what the op gives. What the expansion gives is cast to their types, so it
            may compute in others.
    """
    fakes = [operand.node.meta["val"] for operand in case.operands]

    def function(*given: torch.Tensor) -> Any:
        values = iter(given)
        arguments = {name: _given(value, values) for name, value in case.arguments.items()}
        return _cast(expansion.function(**arguments), results)

    with torch.no_grad(), fake_mode_of(fakes):
        graph = make_fx(function, _allow_non_fake_inputs=False)(*fakes).graph
    simplify(graph)
    return graph


def _cast(value: Any, results: Any) -> Any:
    """Tensors in the element types of others."""
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(*pair) for pair in zip(value, results, strict=True))
    if isinstance(value, torch.Tensor) and isinstance(results, torch.Tensor):
        return value.to(results.dtype)
    return value


def _given(argument: Any, values: Iterator[torch.Tensor]) -> Any:
    """An argument with the next values in the place of its operands."""
    if isinstance(argument, Operand):
        return next(values)
    if isinstance(argument, (list, tuple)):
        return [_given(item, values) for item in argument]
    return argument


def fake_mode_of(values: Iterable[Any]) -> FakeTensorMode:
    """The mode in which fakes have been computed; a new one where there is none."""
    for value in values:
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return FakeTensorMode()


def replace_by(node: fx.Node, made: Any) -> dict[fx.Node, fx.Node]:
    """Let the users of a node use what was made instead; gives what stands for what."""
    if isinstance(made, fx.Node):
        node.replace_all_uses_with(made)
        return {node: made}
    replaced = {}
    for user in list(node.users):
        assert user.target is operator.getitem
        index = user.args[1]
        assert isinstance(index, int)
        user.replace_all_uses_with(made[index])
        replaced[user] = made[index]
        user.graph.erase_node(user)
    return replaced
