"""What random models are trained by: losses, optimizers and schedulers of learning rates.

A loss is a function of logits [rows, LENGTH, VOCABULARY]; a target int64 [rows, LENGTH], -100 where
there is none; weights of classes [VOCABULARY]; and a variant, whose digits choose its options.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .blocks import VOCABULARY, Digits


def _one_hot(logits: Tensor, target: Tensor) -> Tensor:
    return functional.one_hot(target.clamp(min=0), VOCABULARY).to(logits.dtype)


def cross_entropy(logits: Tensor, target: Tensor, weight: Tensor, variant: int) -> Tensor:
    digits = Digits(variant)
    smoothing = (0.0, 0.0, 0.1)[digits.take(3)]
    class_weight = weight if digits.take(3) == 2 else None
    ignore_index, reduction = (
        (-100, 0)[digits.take(4) == 3],
        ("mean", "mean", "sum")[digits.take(3)],
    )
    if ignore_index == 0:
        target = target.clamp(min=0)
    inputs, labels = (logits.flatten(0, 1), target.flatten())
    if digits.take(3) == 2:
        inputs, labels = logits.transpose(1, 2), target
    return functional.cross_entropy(
        inputs,
        labels,
        class_weight,
        ignore_index=ignore_index,
        label_smoothing=smoothing,
        reduction=reduction,
    )


def soft_labels(logits: Tensor, target: Tensor, weight: Tensor, variant: int) -> Tensor:
    labels = _one_hot(logits, target) * 0.8 + 0.2 / VOCABULARY
    smoothing = (0.0, 0.1)[variant % 2]
    return functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(0, 1), label_smoothing=smoothing
    )


def nll(logits: Tensor, target: Tensor, weight: Tensor, variant: int) -> Tensor:
    class_weight = weight if variant % 2 else None
    return functional.nll_loss(logits.log_softmax(-1).flatten(0, 1), target.flatten(), class_weight)


def masked(logits: Tensor, target: Tensor, weight: Tensor, variant: int) -> Tensor:
    loss = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return loss.sum() / (target != -100).sum()


def mse(logits: Tensor, target: Tensor, weight: Tensor, variant: int) -> Tensor:
    if variant % 3 == 2:
        is_labelled = (target != -100)[..., None]
        return ((logits - _one_hot(logits, target)) ** 2 * is_labelled).sum() / is_labelled.sum()
    return functional.mse_loss(
        logits, _one_hot(logits, target), reduction=("mean", "sum")[variant % 3]
    )


def bce(logits: Tensor, target: Tensor, weight: Tensor, variant: int) -> Tensor:
    labels = _one_hot(logits, target)
    if variant % 3 == 0:
        return functional.binary_cross_entropy(logits.sigmoid(), labels)
    class_weight = weight if variant % 3 == 1 else None
    return functional.binary_cross_entropy_with_logits(logits, labels, pos_weight=class_weight)


def robust(logits: Tensor, target: Tensor, weight: Tensor, variant: int) -> Tensor:
    labels = _one_hot(logits, target)
    variants: tuple[Callable[..., Tensor], ...] = (
        functional.huber_loss,
        lambda x, y: functional.huber_loss(x, y, delta=0.5, reduction="sum"),
        lambda x, y: functional.smooth_l1_loss(x, y, beta=0.5),
        functional.l1_loss,
        lambda x, y: functional.soft_margin_loss(x, 2 * y - 1),
        lambda x, y: functional.multilabel_soft_margin_loss(x.flatten(0, 1), y.flatten(0, 1)),
    )
    return variants[variant % len(variants)](logits, labels)


def divergence(logits: Tensor, target: Tensor, weight: Tensor, variant: int) -> Tensor:
    target_log_probabilities = (_one_hot(logits, target) * 2).log_softmax(-1)
    log_probabilities = logits.log_softmax(-1)
    if variant % 3 == 0:
        return functional.kl_div(
            log_probabilities, target_log_probabilities, reduction="batchmean", log_target=True
        )
    if variant % 3 == 1:
        return functional.kl_div(log_probabilities, target_log_probabilities.exp(), reduction="sum")
    return (log_probabilities.exp() * log_probabilities).sum(-1).mean()


def others(logits: Tensor, target: Tensor, weight: Tensor, variant: int) -> Tensor:
    labels, flat = _one_hot(logits, target), logits.flatten(0, 1)
    variants: tuple[Callable[[], Tensor], ...] = (
        lambda: ((logits - labels).square() / (functional.softplus(logits) + 0.1)).mean(),
        lambda: functional.poisson_nll_loss(logits, labels),
        lambda: functional.multi_margin_loss(flat, target.clamp(min=0).flatten()),
        lambda: functional.cosine_embedding_loss(
            flat, labels.flatten(0, 1), torch.ones_like(flat[:, 0])
        ),
        lambda: functional.triplet_margin_loss(flat, labels.flatten(0, 1), flat.flip(-1)),
        lambda: functional.hinge_embedding_loss(flat, 2 * labels.flatten(0, 1) - 1),
        lambda: functional.margin_ranking_loss(
            flat[:, 0], flat[:, 1], torch.ones_like(flat[:, 0]), 0.1
        ),
        lambda: logits.logsumexp(-1).square().mean() + logits.std(-1).mean(),
        lambda: (
            logits.amax(-1) - logits.gather(-1, target.clamp(min=0)[..., None])[..., 0]
        ).mean(),
    )
    return variants[variant % len(variants)]()


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    function.__name__: function
    for function in (
        cross_entropy,
        soft_labels,
        nll,
        masked,
        mse,
        bce,
        robust,
        divergence,
        others,
    )
}


def _epsilon(parameters: list[nn.Parameter]) -> float:
    """Large where rounding would decide on the sign of an update."""
    return 1e-6 if parameters[0].dtype == torch.float64 else 1e-2


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.5, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=_epsilon(p)),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, eps=_epsilon(p), amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=max(1e-4, _epsilon(p))),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, eps=max(1e-4, _epsilon(p))),
}

SCHEDULERS: tuple[Callable[[torch.optim.Optimizer], Any], ...] = (
    lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, 8),
    lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
)
