"""Find hooks on the gradients of tensors, which a traced step does not call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether autograd would run somebody's Python where it adds up the gradient of a leaf.

    Besides hooks of the tensor these are hooks of the node that adds up, for which torch has no
    public list: `p.expand_as(p).grad_fn.next_functions[0][0].register_hook(...)`.
    """
    if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
        return True
    if not (tensor.requires_grad and tensor.is_leaf):
        return False
    with torch.enable_grad(), torch._C.DisableTorchFunction():
        node = get_gradient_edge(tensor).node
    return _has_others(node.register_hook) or _has_others(node.register_prehook)


def _has_others(register: Callable[[Callable[..., Any]], RemovableHandle]) -> bool:
    """Whether a node has hooks of a kind: the handle of one more knows the others."""
    handle = register(_nothing)
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return hooks is not None and len(hooks) > 0


def _nothing(*_: Any) -> None:
    """A hook that is removed before it runs."""
