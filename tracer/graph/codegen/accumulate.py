"""Add gradients to `.grad` of parameters, as autograd does. Bodies call this at their end."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...values.gradient_buckets import set_gradient


def accumulate(
    params: list[torch.Tensor],
    gradients: list[torch.Tensor],
    owned: tuple[bool, ...],
    memory: Mapping[int, torch.Tensor],
) -> None:
    """Add gradients to `.grad` of parameters, as autograd does.

    A parameter whose `.grad` is None takes over the gradient itself, if nothing else refers to its
    memory and it has the parameter's strides; else it gets a copy with these strides.

    Args:
        params: the parameters.
        gradients: a gradient for each parameter, of the parameter's shape.
        owned: for each gradient, whether nothing else refers to its memory.
        memory: memory for `.grad` of parameters that have none, by the parameter's id; the gradient
            is copied there.
    """
    held: list[torch.Tensor] = []
    new: list[torch.Tensor] = []
    for param, gradient, is_owned in zip(params, gradients, owned, strict=True):
        existing = param.grad
        if existing is not None:
            held.append(existing)
            new.append(gradient)
        elif id(param) in memory:
            set_gradient(param, memory[id(param)].copy_(gradient))
        elif is_owned and (gradient.is_sparse or gradient.stride() == param.stride()):
            set_gradient(param, gradient)
        else:
            own = torch.empty_like(param, device=gradient.device, requires_grad=False)
            set_gradient(param, own.copy_(gradient))
    if held:
        torch._foreach_add_(held, new)
