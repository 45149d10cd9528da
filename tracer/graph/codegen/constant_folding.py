"""Fold constants: compute small tensors that depend on no input once, not in each execution."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from ...method.node_memory import memory_of
from ...values.operators import is_random, written_values
from ..autodiff.subgraphs import results

SMALL = 1 << 16
"""The most bytes of a constant; larger ones would cost memory as long as the step exists."""


def fold_constants(graph: fx.Graph) -> dict[fx.Node, torch.Tensor]:
    """Compute the nodes of a graph that depend on no input and no state.

    Not computed are random numbers, `empty` tensors, large tensors, tensors that are not on the
    host, and tensors that share memory with a value that the graph gives or writes to.

    Returns:
        The values of the nodes.
    """
    excluded = set(_memory_kept(graph))
    constants: dict[fx.Node, torch.Tensor] = {}
    # As in an execution: without the modes under which graphs are traced.
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
    ):
        for node in graph.nodes:
            if _is_constant(node, constants) and memory_of(node) not in excluded:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), constants.__getitem__)
                value, expected = node.target(*args, **kwargs), node.meta["val"]
                if value.dtype is expected.dtype and value.stride() == expected.stride():
                    constants[node] = value
    return constants


def _is_constant(node: fx.Node, constants: dict[fx.Node, torch.Tensor]) -> bool:
    value, target = node.meta.get("val"), node.target
    return (
        node.op == "call_function"
        and isinstance(target, torch._ops.OpOverload)
        and target.namespace == "aten"
        and not target._schema.is_mutable
        and "empty" not in target._schema.name
        and not is_random(target, node.args, node.kwargs)
        and isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and value.untyped_storage().nbytes() <= SMALL
        and all(operand in constants for operand in node.all_input_nodes)
    )


def _memory_kept(graph: fx.Graph) -> Iterator[int | None]:
    """The memory of results, of values that are written to, and of operands of unknown effect."""
    for node in graph.nodes:
        nodes: Iterable[Any] = ()
        if node.op == "output":
            nodes = results(graph)
        elif isinstance(node.target, torch._ops.OpOverload):
            nodes = written_values(node.target, node.args, node.kwargs)
        elif node.op == "call_function" and node.target is not operator.getitem:
            nodes = node.all_input_nodes
        yield from (memory_of(n) for n in nodes if isinstance(n, fx.Node))
