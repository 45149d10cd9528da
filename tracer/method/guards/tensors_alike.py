"""Compare tensors with earlier ones in C++, by TorchDynamo's guard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch._C._dynamo.guards import TensorGuards


def never(*args: Any) -> bool:
    """A check that nothing passes."""
    return False


def check_of(tensors: Sequence[Tensor], strides: bool) -> Callable[..., bool]:
    """A check of as many tensors: type, dtype, shape, device, layout and `requires_grad`.

    It is stricter than a step: a tensor that it refuses may still fit.

    Args:
        tensors: the tensors to compare with; at least one.
        strides: True to compare strides as well.
    """
    sizes: list[Any] = [list(tensor.shape) for tensor in tensors]
    steps: list[Any] = [
        list(tensor.stride()) if strides else [None] * tensor.ndim for tensor in tensors
    ]
    guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=steps)
    check: Callable[..., bool] = guards.check
    return check
