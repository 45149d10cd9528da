"""Rules of losses: batches and classes may be cut.

The loss of a cut batch is a sum over ranks; a mean divides the sum by the count of the whole batch.
If classes are cut, each rank compares its classes with the target and sums the matching entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .....ir.attributes import ReduceOp
from ....checked_ids import CHECKED_IDS
from ..cases import Answer, Case, Expansion, Operand, Rule, whole
from ..factors import Dims, Factors, each, sizes_of
from ..solution import solve
from ..values.accumulation import accumulated, accumulation_type
from .creation import counting
from .pointwise import broadcast, operand

_ATEN = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2
"""Reductions of losses, as aten numbers them."""


def _is_cut(case: Case) -> bool:
    return any(operand.layout.axes for operand in case.operands)


def _entries(case: Case) -> Answer | Expansion:
    """A loss that compares two tensors entry by entry."""
    if case["reduction"] == _MEAN and _is_cut(case):
        return Expansion(partial(_mean_of, case.target))
    if case["reduction"] == _SUM and _is_cut(case) and _is_rounded(case["self"]):
        return Expansion(partial(_sum_of, case.target))
    shapes = [operand.shape for operand in case.operands]
    full = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    operand_dims, result_dims = broadcast(shapes, tuple(full))
    sizes = {f"d{i}": size for i, size in enumerate(full)}
    result = result_dims if case["reduction"] == _NONE else ()
    return solve(case, Factors(operand_dims, (result,), sizes, (), {}, ReduceOp.SUM))


def _is_rounded(operand: Operand) -> bool:
    """True if a sum of the tensor is computed in a wider type, and then rounded."""
    return accumulation_type(operand.dtype) is not operand.dtype


def _mean_of(op: Any, /, *, reduction: int, **arguments: Any) -> torch.Tensor:
    losses: torch.Tensor = op(**arguments, reduction=_NONE)
    return accumulated(losses).sum() / losses.numel()


def _sum_of(op: Any, /, *, reduction: int, **arguments: Any) -> torch.Tensor:
    losses: torch.Tensor = op(**arguments, reduction=_NONE)
    return accumulated(losses).sum()


def _entries_backward(case: Case) -> Answer | Expansion:
    if case["reduction"] == _MEAN and _is_cut(case):
        return Expansion(partial(_mean_backward_of, case.target))
    shapes = [operand.shape for operand in case.operands]
    full = case.shape()
    operand_dims, result_dims = broadcast(shapes, full)
    sizes = {f"d{i}": size for i, size in enumerate(full)}
    return solve(case, Factors(operand_dims, (result_dims,), sizes, each(0)))


def _mean_backward_of(
    op: Any, /, *, grad_output: torch.Tensor, self: torch.Tensor, reduction: int, **arguments: Any
) -> torch.Tensor:
    shared = accumulated(grad_output) / self.numel()
    wide = {name: _wide(value) for name, value in arguments.items()}
    gradient: torch.Tensor = op(grad_output=shared, self=accumulated(self), **wide, reduction=_SUM)
    return gradient


def _wide(value: Any) -> Any:
    return accumulated(value) if isinstance(value, torch.Tensor) else value


def _nll_loss(case: Case) -> Answer | Expansion:
    """Loss and total weight: over a cut batch both are summands, and a mean divides their sums."""
    log_probs: Operand = case["self"]
    dims, batch, classes = _dims(log_probs)
    weight = operand(case, "weight")
    if case.has_cut(log_probs, classes) or case.has_cut(weight, 0):
        return counting(partial(_nll_loss_of, weight is not None), log_probs.cuts[classes])
    cut_batch = any(case.has_cut(log_probs, dim) for dim in range(len(dims)))
    if (cut_batch or any(case["target"].cuts)) and (
        case["reduction"] == _MEAN or _adds_rounded(case)
    ):
        return Expansion(partial(_summed, case.target))
    operands = (dims, batch, *([(("c",),)] if weight is not None else []))
    results = (batch, None) if case["reduction"] == _NONE else ((), ())
    sizes = sizes_of([dims], [log_probs.shape])
    answer = solve(case, Factors(operands, results, sizes, (), _KEEP))
    if case["reduction"] == _NONE:  # no total weight is computed, so it is the same on all ranks
        return replace(answer, results=(answer.results[0], whole(0)))
    return answer


_KEEP = {"c": "has the entry of the target"}


def _dims(log_probs: Operand) -> tuple[Dims, Dims, int]:
    """The dimensions of log-probabilities, those of their targets, and which one the classes are.

    Classes are the second dimension, behind a batch and before an image's rows and columns; or the
    only one.
    """
    rank = len(log_probs.shape)
    classes = min(1, rank - 1)
    dims = tuple((letter,) for letter in ("c" if rank == 1 else "nchw"[:rank]))
    return dims, dims[:classes] + dims[classes + 1 :], classes


def _adds_rounded(case: Case) -> bool:
    return case["reduction"] == _SUM and _is_rounded(case["self"])


def _summed(
    op: Any, /, *, self: torch.Tensor, weight: Any, reduction: int, **arguments: Any
) -> Any:
    """The loss of a cut batch: sums of losses and of weights, each in the accumulation type."""
    if accumulation_type(self.dtype) is self.dtype:
        total, count = op(self=self, weight=weight, **arguments, reduction=_SUM)
    else:
        losses, _ = op(self=self, weight=weight, **arguments, reduction=_NONE)
        total = accumulated(losses).sum()
        count = _weights(weight, **arguments).sum(dtype=total.dtype)
    return (total / count if reduction == _MEAN else total), count


def _weights(weight: Any, *, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """The weight of each target: 1 or the weight of its class; 0 if the target is ignored."""
    counted = target != ignore_index
    if weight is None:
        return counted
    return torch.where(counted, weight[torch.where(counted, target, 0)], 0)


def _nll_loss_of(
    weighted: bool,
    *,
    self: torch.Tensor,
    target: torch.Tensor,
    weight: Any,
    reduction: int,
    ignore_index: int,
) -> Any:
    """The loss by comparisons of classes with targets: sums over pieces of the classes."""
    self = _classes_last(self)
    # Without a check, a target out of range would match no class, and have the loss 0.
    target = CHECKED_IDS(target, self.shape[-1], ignore_index, "nll_loss")
    chosen = _chosen(self, target, ignore_index)
    class_weights = self.new_ones(self.shape[-1:]) if not weighted else weight
    wide = accumulation_type(self.dtype)
    weights = torch.where(chosen, class_weights, 0).sum(-1, dtype=wide)
    picked = torch.where(chosen, self, 0).sum(-1, dtype=wide)
    losses = -picked * weights
    if reduction == _NONE:
        return losses, self.new_zeros(())
    total, count = losses.sum(), weights.sum()
    return (total / count if reduction == _MEAN else total), count


def _classes_last(log_probs: torch.Tensor) -> torch.Tensor:
    return log_probs.movedim(min(1, log_probs.dim() - 1), -1)


def _chosen(log_probs: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    classes = torch.arange(log_probs.shape[-1], device=log_probs.device)
    counted = (target != ignore_index).unsqueeze(-1)
    return (target.unsqueeze(-1) == classes) & counted


def _nll_loss_backward(case: Case) -> Answer | Expansion:
    log_probs: Operand = case["self"]
    dims, batch, classes = _dims(log_probs)
    weight = operand(case, "weight")
    if case.has_cut(log_probs, classes) or case.has_cut(weight, 0):
        cut = log_probs.cuts[classes]
        return counting(partial(_nll_loss_backward_of, weight is not None), cut)
    gradient = batch if case["reduction"] == _NONE else ()
    operands = (gradient, dims, batch, *([(("c",),)] if weight is not None else []), ())
    sizes = sizes_of([dims], [log_probs.shape])
    return solve(case, Factors(operands, (dims,), sizes, each(0), _KEEP))


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
    wide = accumulated(grad_output)
    scaled = wide / total_weight if reduction == _MEAN else wide
    log_probs = _classes_last(self)
    class_weights = log_probs.new_ones(log_probs.shape[-1:]) if not weighted else weight
    spread = scaled.unsqueeze(-1) if reduction == _NONE else scaled
    chosen = _chosen(log_probs, target, ignore_index)
    return torch.where(chosen, -spread * class_weights, 0).movedim(-1, min(1, self.dim() - 1))


RULES: Mapping[object, Rule] = {
    _ATEN.nll_loss_forward.default: _nll_loss,
    _ATEN.nll_loss_backward.default: _nll_loss_backward,
    _ATEN.nll_loss2d_forward.default: _nll_loss,
    _ATEN.nll_loss2d_backward.default: _nll_loss_backward,
    **dict.fromkeys(
        (
            *(_ATEN.mse_loss.default, _ATEN.smooth_l1_loss.default, _ATEN.huber_loss.default),
            *(_ATEN.soft_margin_loss.default, _ATEN.binary_cross_entropy.default),
            _ATEN.binary_cross_entropy_with_logits.default,
        ),
        _entries,
    ),
    **dict.fromkeys(
        (
            *(_ATEN.mse_loss_backward.default, _ATEN.smooth_l1_loss_backward.default),
            *(_ATEN.huber_loss_backward.default, _ATEN.soft_margin_loss_backward.default),
            _ATEN.binary_cross_entropy_backward.default,
        ),
        _entries_backward,
    ),
}
