"""Count the floating-point operations of a graph, as torch's flop counter does.

Matrix products, convolutions and attention count, with two operations for each multiply-add.
Everything else is bound by memory, and counts as zero.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ....ir.flops import Flops
from ....ir.types import DType
from ...values.specs import ir_dtype

_ATTENTION = frozenset(
    name
    for kernel in ("efficient", "flash", "cudnn")
    for direction in ("", "_backward")
    for name in (
        f"aten::_scaled_dot_product_{kernel}_attention{direction}",
        f"cg::scaled_dot_product_{kernel}_attention{direction}_step",
    )
)


def count_flops(graph: fx.Graph) -> Flops:
    """The operations of one run of a graph whose nodes know what they have computed."""
    counts: Counter[DType] = Counter()
    for node in graph.nodes:
        counted = flops_of(node)
        if counted is not None:
            counts[counted[0]] += counted[1]
    return Flops.of(counts)


def flops_of(node: fx.Node) -> tuple[DType, int] | None:
    """The operations of a node, and the element type in which it does them; None if none count."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    formula = flop_registry.get(node.target.overloadpacket)
    if formula is None:
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), _value)
    result = node.meta.get("val")
    dtype = _element_type(args, kwargs, result)
    return dtype, int(formula(*_with_all_heads(node, args), **kwargs, out_val=result))


def _with_all_heads(node: fx.Node, args: Any) -> Any:
    """Arguments of attention, with as many heads of keys and values as of queries.

    The kernels compute with all heads; torch's formulas before 2.12 take nothing else.
    """
    op = node.target
    if not (isinstance(op, torch._ops.OpOverload) and op._schema.name in _ATTENTION):
        return args
    names = [argument.name for argument in op._schema.arguments]
    operands = list(args)
    heads = operands[names.index("query")].shape[1]
    for index in (names.index("key"), names.index("value")):
        batch, _, *others = operands[index].shape
        operands[index] = operands[index].new_empty(batch, heads, *others)
    return operands


def _value(node: fx.Node) -> Any:
    value = node.meta.get("val")
    assert value is not None, f"nothing is known of {node}"
    return value


def _element_type(args: Any, kwargs: Any, result: Any) -> DType:
    """The element type of the first factor; bfloat16 for narrow types that the IR does not name."""
    dtypes = [
        value.dtype for value in tree_leaves((args, kwargs, result)) if torch.is_tensor(value)
    ]
    numbers = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    with suppress(ValueError, IndexError):
        return ir_dtype((numbers or dtypes)[0])
    return DType.BF16
