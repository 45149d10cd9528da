"""Rules of softmax and of losses over classes, with classes that may be cut.

Where classes are cut, an op is expanded to a maximum, a sum of exponentials and what lies between
them; each becomes a reduction over ranks. As in Megatron-LM's vocabulary-parallel cross entropy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..cases import Answer, Case, Expansion, Operand, Rule, dim_of, whole
from ..factors import Dims, Factors, each, solve
from .pointwise import operand
from .views import named

_ATEN = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2
"""Reductions of losses, as aten numbers them."""


def _along(case: Case, expanded: Any) -> Answer | Expansion:
    """An op along a dimension; over a cut one, it is expanded."""
    first = case.operands[0]
    dim = dim_of(case["dim"], len(first.shape))
    if any(case.has_cut(operand, dim) for operand in case.operands if operand.shape):
        return Expansion(expanded)
    dims = named(first.shape)
    sizes = {f"d{i}": size for i, size in enumerate(first.shape)}
    keep = {f"d{dim}": "is normalized"}
    return solve(case, Factors((dims,) * len(case.operands), (dims,), sizes, (), keep))


def _softmax(case: Case) -> Answer | Expansion:
    return _along(case, _softmax_of)


def _softmax_of(*, self: torch.Tensor, dim: int, half_to_float: bool = False) -> torch.Tensor:
    given = self.float() if half_to_float else self
    powers = (given - given.amax(dim, keepdim=True)).exp()
    return powers / powers.sum(dim, keepdim=True)


def _log_softmax(case: Case) -> Answer | Expansion:
    return _along(case, _log_softmax_of)


def _log_softmax_of(*, self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    given = self.float() if half_to_float else self
    shifted = given - given.amax(dim, keepdim=True)
    return shifted - shifted.exp().sum(dim, keepdim=True).log()


def _softmax_backward(case: Case) -> Answer | Expansion:
    return _along(case, _softmax_backward_of)


def _softmax_backward_of(
    *, grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    product = grad_output * output
    return (product - output * product.sum(dim, keepdim=True)).to(input_dtype)


def _log_softmax_backward(case: Case) -> Answer | Expansion:
    return _along(case, _log_softmax_backward_of)


def _log_softmax_backward_of(
    *, grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    total = grad_output.sum(dim, keepdim=True)
    return (grad_output - output.exp() * total).to(input_dtype)


def _safe_softmax(case: Case) -> Answer | Expansion:
    dims = named(case.operands[0].shape)
    sizes = {f"d{i}": size for i, size in enumerate(case.shape())}
    dim = dim_of(case["dim"], len(dims))
    return solve(case, Factors((dims,), (dims,), sizes, (), {f"d{dim}": "is normalized"}))


def _nll_loss(case: Case) -> Answer | Expansion:
    """Loss and weight of targets: over a cut batch both are summands, and a mean divides after."""
    given: Operand = case["self"]
    classes = len(given.shape) - 1
    cut_batch = (classes == 1 and case.has_cut(given, 0)) or any(case["target"].cuts)
    weight = operand(case, "weight")
    if case.has_cut(given, classes) or case.has_cut(weight, 0):
        return Expansion(partial(_nll_loss_of, weight is not None), given.cuts[classes])
    if case["reduction"] == _MEAN and cut_batch:
        return Expansion(_nll_loss_mean)
    batch, sizes = _batch(given)
    operands = [(*batch, ("c",)), batch, *([(("c",),)] if weight is not None else [])]
    if case["reduction"] == _NONE:
        return _unreduced(case, tuple(operands), batch, sizes)
    keep = {"c": "has the entry of the target"}
    return solve(case, Factors(tuple(operands), ((), ()), sizes, (), keep))


def _unreduced(
    case: Case, operands: tuple[Dims, ...], batch: Dims, sizes: Mapping[str, int]
) -> Answer:
    """A loss for each row; the total weight is not computed, so the same on all ranks."""
    keep = {"c": "has the entry of the target"}
    answer = solve(case, Factors(operands, (batch, None), sizes, (), keep))
    return replace(answer, results=(answer.results[0], whole(0)))


def _batch(given: Operand) -> tuple[Dims, dict[str, int]]:
    sizes = {"c": given.shape[-1]}
    if len(given.shape) == 1:
        return (), sizes
    return (("n",),), sizes | {"n": given.shape[0]}


def _nll_loss_mean(
    *, self: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignore_index: int
) -> Any:
    total, count = _ATEN.nll_loss_forward(self, target, weight, _SUM, ignore_index)
    return total / count, count


def _nll_loss_of(
    weighted: bool,
    *,
    self: torch.Tensor,
    target: torch.Tensor,
    weight: Any,
    reduction: int,
    ignore_index: int,
) -> Any:
    """The loss by comparisons of classes with targets, which pieces of the classes add up to."""
    chosen = _chosen(self, target, ignore_index)
    one = self.new_ones(self.shape[-1:]) if not weighted else weight
    weights = torch.where(chosen, one, 0).sum(-1)
    picked = torch.where(chosen, self, 0).sum(-1)
    losses = -picked * weights
    if reduction == _NONE:
        return losses, self.new_zeros(())
    total, count = losses.sum(), weights.sum()
    return (total / count if reduction == _MEAN else total), count


def _chosen(given: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    classes = torch.arange(given.shape[-1], device=given.device)
    counted = (target != ignore_index).unsqueeze(-1)
    return (target.unsqueeze(-1) == classes) & counted


def _nll_loss_backward(case: Case) -> Answer | Expansion:
    given: Operand = case["self"]
    weight = operand(case, "weight")
    if case.has_cut(given, len(given.shape) - 1) or case.has_cut(weight, 0):
        cut = given.cuts[-1]
        return Expansion(partial(_nll_loss_backward_of, weight is not None), cut)
    batch, sizes = _batch(given)
    gradient = batch if case["reduction"] == _NONE else ()
    operands = [gradient, (*batch, ("c",)), batch]
    operands += [(("c",),)] if weight is not None else []
    keep = {"c": "has the entry of the target"}
    result = (*batch, ("c",))
    return solve(case, Factors((*operands, ()), (result,), sizes, each(0), keep))


def _nll_loss_backward_of(
    weighted: bool,
    *,
    grad_output: torch.Tensor,
    self: torch.Tensor,
    target: torch.Tensor,
    weight: Any,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    scaled = grad_output / total_weight if reduction == _MEAN else grad_output
    one = self.new_ones(self.shape[-1:]) if not weighted else weight
    spread = scaled.unsqueeze(-1) if reduction == _NONE else scaled
    return torch.where(_chosen(self, target, ignore_index), -spread * one, 0)


RULES: Mapping[object, Rule] = {
    _ATEN._softmax.default: _softmax,
    _ATEN._log_softmax.default: _log_softmax,
    _ATEN._softmax_backward_data.default: _softmax_backward,
    _ATEN._log_softmax_backward_data.default: _log_softmax_backward,
    _ATEN._safe_softmax.default: _safe_softmax,
    _ATEN.nll_loss_forward.default: _nll_loss,
    _ATEN.nll_loss_backward.default: _nll_loss_backward,
}
