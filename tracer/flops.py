"""How many floating-point operations a graph does, as torch's flop counter counts them.

Matrix products, convolutions and attention count, two operations for each multiply-add. All else
is bound by memory, and counts for nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from ..ir.flops import Flops
from ..ir.types import DType
from .specs import ir_dtype


def count_flops(graph: fx.Graph) -> Flops:
    """The operations of one run of a graph whose nodes know what they have computed."""
    counts: Counter[DType] = Counter()
    for node in graph.nodes:
        formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if node.op == "call_function" and formula is not None:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), _value)
            factors = (value for value in (*args, *kwargs.values()) if torch.is_tensor(value))
            dtype = _named(next(factors).dtype)
            counts[dtype] += int(formula(*args, **kwargs, out_val=node.meta.get("val")))
    return Flops.of(counts)


def _value(node: fx.Node) -> Any:
    value = node.meta.get("val")
    assert value is not None, f"nothing is known of {node}"
    return value


def _named(dtype: torch.dtype) -> DType:
    """The IR's name of an element type; one that it has none for is narrow, as bfloat16 is."""
    try:
        return ir_dtype(dtype)
    except ValueError:
        return DType.BF16
