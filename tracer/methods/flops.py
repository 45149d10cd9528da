"""Count the floating-point operations of a graph, as torch's flop counter does.

Matrix products, convolutions and attention count, two operations for each multiply-add. All else
is bound by memory, and counts for nothing.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ...ir.flops import Flops
from ...ir.types import DType
from ..step.specs import ir_dtype


def count_flops(graph: fx.Graph) -> Flops:
    """The operations of one run of a graph whose nodes know what they have computed."""
    counts: Counter[DType] = Counter()
    for node in graph.nodes:
        formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if node.op == "call_function" and formula is not None:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), _value)
            result = node.meta.get("val")
            dtype = _element_type(args, kwargs, result)
            counts[dtype] += int(formula(*args, **kwargs, out_val=result))
    return Flops.of(counts)


def _value(node: fx.Node) -> Any:
    value = node.meta.get("val")
    assert value is not None, f"nothing is known of {node}"
    return value


def _element_type(args: Any, kwargs: Any, result: Any) -> DType:
    """Of the first factor; bfloat16 if the IR has no name for it, as for other narrow types."""
    found = [value.dtype for value in tree_leaves((args, kwargs, result)) if torch.is_tensor(value)]
    numbers = [dtype for dtype in found if dtype.is_floating_point or dtype.is_complex]
    with suppress(ValueError, IndexError):
        return ir_dtype((numbers or found)[0])
    return DType.BF16
