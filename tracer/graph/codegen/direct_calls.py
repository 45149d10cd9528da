"""The functions that bodies call for operators: torch's own bindings where they do the same.

A call of an operator converts its arguments by the operator's schema, one by one. A binding parses
them in generated code, which saves half a microsecond and more. Both look for `__torch_function__`.
The table has operators in which small graphs spend their time, and whose binding takes the same
arguments. An operator of cg's own that is written in Python is called without the dispatcher, which
would take longer than some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...method.experts.expert_products import GROUPED_MM, GROUPED_MM_OUT, grouped_mm
from ...method.experts.rows_by_expert import KERNELS
from ..layouts.asked import ASKED

_ATEN = torch.ops.aten
_FUNCTIONS: Any = torch._C._VariableFunctions


def _copy(value: torch.Tensor, cuts: str) -> torch.Tensor:
    """`cg.layout` without a mesh. On a mesh, no body calls it: its rule has replaced it."""
    return value.clone()


BINDINGS: Mapping[object, Callable[..., Any]] = {
    _ATEN.add.Tensor: _FUNCTIONS.add,
    _ATEN.sub.Tensor: _FUNCTIONS.sub,
    _ATEN.mul.Tensor: _FUNCTIONS.mul,
    _ATEN.mul.out: _FUNCTIONS.mul,
    _ATEN.div.Tensor: _FUNCTIONS.div,
    _ATEN.mm.default: _FUNCTIONS.mm,
    _ATEN.addcmul.default: _FUNCTIONS.addcmul,
    _ATEN.cat.default: _FUNCTIONS.cat,
    _ATEN.index_select.default: _FUNCTIONS.index_select,
    _ATEN.view.default: torch.Tensor.view,
    _ATEN.transpose.int: _FUNCTIONS.transpose,
    _ATEN.permute.default: _FUNCTIONS.permute,
    _ATEN.unsqueeze.default: _FUNCTIONS.unsqueeze,
    _ATEN.select.int: _FUNCTIONS.select,
    ASKED: _copy,
    GROUPED_MM: grouped_mm,
    GROUPED_MM_OUT: grouped_mm,
    **KERNELS,
}


def call_of(target: Any) -> Any:
    """The function to call for a node's target: a binding, or the function in the operator."""
    if type(target) is torch._ops.OpOverload:
        return BINDINGS.get(target) or getattr(target, "_op", target)
    return target
