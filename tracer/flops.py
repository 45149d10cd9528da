"""How many floating-point operations a graph does, as torch's flop counter counts them.

Matrix products, convolutions and attention count, two operations for each multiply-add. All else
is bound by memory, and counts for nothing.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.utils.flop_counter import flop_registry


def count_flops(graph: fx.Graph) -> int:
    """The operations of one run of a graph whose nodes know what they have computed."""
    return sum(_of_node(node) for node in graph.nodes if node.op == "call_function")


def _of_node(node: fx.Node) -> int:
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), _value)
    return int(formula(*args, **kwargs, out_val=node.meta.get("val")))


def _value(node: fx.Node) -> Any:
    value = node.meta.get("val")
    assert value is not None, f"nothing is known of {node}"
    return value
