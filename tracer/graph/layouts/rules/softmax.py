"""Rules of softmax, along a dimension that may be cut.

Along a cut dimension, an op is expanded to a maximum, a sum of exponentials and pointwise ops. The
maximum and the sum become reductions over ranks, in the accumulation type. Megatron-LM's
vocabulary-parallel cross entropy does the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ..cases import Answer, Case, Expansion, Rule, dim_of
from ..factors import Factors, solve
from ..values.accumulation import accumulated
from .views import named

_ATEN = torch.ops.aten


def _along(expanded: Any, case: Case) -> Answer | Expansion:
    """An op along a dimension; if the dimension is cut, `expanded` replaces the op."""
    first = case.operands[0]
    dim = dim_of(case["dim"], len(first.shape))
    if any(case.has_cut(operand, dim) for operand in case.operands if operand.shape):
        return Expansion(expanded)
    dims = named(first.shape)
    sizes = {f"d{i}": size for i, size in enumerate(first.shape)}
    keep = {f"d{dim}": "is normalized"}
    return solve(case, Factors((dims,) * len(case.operands), (dims,), sizes, (), keep))


def _softmax(*, self: torch.Tensor, dim: int, half_to_float: bool = False) -> torch.Tensor:
    powers = (accumulated(self) - self.amax(dim, keepdim=True)).exp()
    return powers / powers.sum(dim, keepdim=True)


def _log_softmax(*, self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    shifted = accumulated(self) - self.amax(dim, keepdim=True)
    return shifted - shifted.exp().sum(dim, keepdim=True).log()


def _softmax_backward(
    *, grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    wide = accumulated(output)
    product = grad_output * wide
    return product - wide * product.sum(dim, keepdim=True)


def _log_softmax_backward(
    *, grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    wide = accumulated(grad_output)
    return wide - accumulated(output).exp() * wide.sum(dim, keepdim=True)


def _safe_softmax(case: Case) -> Answer | Expansion:
    dims = named(case.operands[0].shape)
    sizes = {f"d{i}": size for i, size in enumerate(case.shape())}
    dim = dim_of(case["dim"], len(dims))
    return solve(case, Factors((dims,), (dims,), sizes, (), {f"d{dim}": "is normalized"}))


RULES: Mapping[object, Rule] = {
    _ATEN._softmax.default: partial(_along, _softmax),
    _ATEN._log_softmax.default: partial(_along, _log_softmax),
    _ATEN._softmax_backward_data.default: partial(_along, _softmax_backward),
    _ATEN._log_softmax_backward_data.default: partial(_along, _log_softmax_backward),
    _ATEN._safe_softmax.default: _safe_softmax,
}
