"""Choose the values of a forward that may be saved in a smaller type: `compile(saved="bf16")`.

Source: the idea is that of activation compression, as in Chen et al., ActNN, ICML 2021; here values
are rounded to bfloat16.
"""

from __future__ import annotations

import torch
from torch import fx

from ...method.joint_graph import Joint
from ...method.node_memory import memory_of
from ...values.operators import written_values

NARROW = torch.bfloat16
"""The type in which such values are saved."""

_SMALLEST_PART = 64
"""A tensor with less than this part of the bytes of the largest is exact: it holds statistics."""


def narrowable(joint: Joint) -> frozenset[fx.Node]:
    """The values of a joint graph that take fewer bytes in `NARROW`, if they are saved.

    They are floating, wider than `NARROW`, in memory that the forward makes. Values in memory of
    the forward's operands and results are exact, as that memory is held anyway, and so are those
    in memory that is written in place. Small tensors are exact, too: statistics of norms and of
    attention, whose rounding would change gradients more than it spares.
    """
    nodes = [n for n in joint.graph.nodes if n.op == "call_function" and n.name in joint.forward]
    tensors = {n: n.meta["val"] for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)}
    largest = max((value.nbytes for value in tensors.values()), default=0)
    held = {memory_of(n) for n in (*joint.inputs, *joint.outputs, *(n for n, _ in joint.state))}
    for node in joint.graph.nodes:
        if node.op == "call_function":
            written = written_values(node.target, node.args, node.kwargs)
            held |= {memory_of(value) for value in written if isinstance(value, fx.Node)}
    return frozenset(
        node
        for node, value in tensors.items()
        if value.dtype in (torch.float32, torch.float64)
        and value.nbytes * _SMALLEST_PART >= largest
        and memory_of(node) not in held
    )


def narrowed_bytes(value: torch.Tensor) -> int:
    """The bytes of a tensor in `NARROW`."""
    return value.numel() * NARROW.itemsize
