"""`torch.ctc_loss` as operators whose shapes are known, and whose rows may be cut over ranks.

`cg::ctc_loss` gives the loss of each row and what its gradient takes, `cg::ctc_loss_backward` the
gradient. A row's loss is a recursion over time (Graves et al., 2006), by torch's own kernels. What
these keep is as long as the longest target, which depends on values; here it is as long as targets
are padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...operator_library import defined


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """The result of `torch.nn.functional.ctc_loss`, and of `torch.ctc_loss`, with numbers of aten.

    Raises:
        ValueError: there are not as many targets and lengths as rows.
    """
    is_batch = log_probs.dim() == 3
    rows = log_probs if is_batch else log_probs.unsqueeze(1)
    if rows.dtype not in _COMPUTED:
        rows = rows.float()  # as autocast does
    padded = _padded(targets, target_lengths).to(rows.device, torch.int64)
    lengths = [
        torch.as_tensor(values, dtype=torch.int64, device=rows.device)
        for values in (input_lengths, target_lengths)
    ]
    counts = [len(padded), *map(len, lengths)]
    if counts != [rows.shape[1]] * 3:
        raise ValueError(
            f"ctc_loss of {rows.shape[1]} rows takes as many targets, input lengths and target "
            f"lengths, not {counts[0]}, {counts[1]} and {counts[2]}"
        )
    losses: Tensor
    losses, _ = CTC_LOSS(rows, padded, *lengths, blank, zero_infinity)
    if zero_infinity:
        losses = torch.where(losses == torch.inf, 0.0, losses)
    if reduction in ("mean", 1):
        return (losses / lengths[1].to(losses.dtype).clamp_min(1)).mean()
    if reduction in ("sum", 2):
        return losses.sum()
    return losses if is_batch else losses.squeeze(0)


def accepts_ctc(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    reduction: Any,
    **others: Any,
) -> bool:
    """True for the types that torch's function takes, if the shapes of all results are known.

    Targets one behind the other need lengths in Python. Under autocast the host computes other
    floating types in float32.
    """
    is_cast = torch.is_autocast_enabled("cpu")
    return (
        isinstance(log_probs, Tensor)
        and log_probs.is_floating_point()
        and (log_probs.dtype in _COMPUTED or (is_cast and log_probs.device.type == "cpu"))
        and log_probs.dim() in (2, 3)
        and log_probs.numel() > 0
        and isinstance(targets, Tensor)
        and (targets.dim() == 2 or (targets.dim() == 1 and _are_integers(target_lengths)))
        and all(_are_integers(n) or _is_list(n) for n in (input_lengths, target_lengths))
        and reduction in ("none", "mean", "sum", 0, 1, 2)
    )


_COMPUTED = (torch.float32, torch.float64)


def _are_integers(lengths: Any) -> bool:
    return isinstance(lengths, (list, tuple)) and all(type(length) is int for length in lengths)


def _is_list(lengths: Any) -> bool:
    is_tensor = isinstance(lengths, Tensor) and lengths.dim() == 1
    return is_tensor and lengths.dtype in (torch.int64, torch.int32)


def _padded(targets: Tensor, lengths: Tensor | Sequence[int]) -> Tensor:
    """Targets `[rows, longest]`; they may stand one behind the other."""
    if targets.dim() == 2 or isinstance(lengths, Tensor):
        return targets
    longest = max(lengths, default=0)
    rows = targets.split(list(lengths))  # type: ignore[no-untyped-call]
    return torch.stack([pad(row, (0, longest - len(row))) for row in rows])


def _forward(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    if len(targets) == 0:  # a rank may have no rows, which torch refuses
        return _forward_fake(log_probs, targets)
    losses, log_alpha = torch.ops.aten._ctc_loss(
        *(log_probs, targets, input_lengths.tolist(), target_lengths.tolist()),
        *(blank, zero_infinity),
    )
    return losses, pad(log_alpha, (0, _states(targets) - log_alpha.shape[2]))


def _forward_fake(log_probs: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    steps, rows, _classes = log_probs.shape
    return log_probs.new_empty(rows), log_probs.new_empty(rows, steps, _states(targets))


def _states(targets: Tensor) -> int:
    """Labels of a target, with blanks around them."""
    return 2 * targets.shape[1] + 1


def _gradient(
    gradient: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    losses: Tensor,
    log_alpha: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    if len(targets) == 0:
        return torch.empty_like(log_probs)
    inputs, labels = input_lengths.tolist(), target_lengths.tolist()
    states = 2 * max(labels) + 1
    result: Tensor = torch.ops.aten._ctc_loss_backward(
        *(gradient, log_probs, targets, inputs, labels, losses),
        *(log_alpha[:, :, :states].contiguous(), blank, zero_infinity),
    )
    return result


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *rows, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*rows, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    result = CTC_LOSS_BACKWARD(gradient, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return result, None, None, None, None, None


_ROWS = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths"
CTC_LOSS = defined(
    f"ctc_loss({_ROWS}, int blank, bool zero_infinity) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)
CTC_LOSS_BACKWARD = defined(
    f"ctc_loss_backward(Tensor gradient, {_ROWS}, Tensor losses, Tensor log_alpha, int blank, "
    "bool zero_infinity) -> Tensor",
    _gradient,
    lambda gradient, log_probs, *_: log_probs.new_empty(log_probs.shape),
)
torch.library.register_autograd(CTC_LOSS, _backward, setup_context=_save)
