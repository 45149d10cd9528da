"""Autocast on the fake device: which operations compute in fewer bits, and which in float32.

The lists are torch's own for GPUs, without rare losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .host_memory import KIND

KEY = "AutocastPrivateUse1"

FEWER_BITS = (
    "conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_transpose1d "
    "conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul "
    "einsum mm mv linear addbmm baddbmm bmm linalg_vecdot linalg_multi_dot "
    "scaled_dot_product_attention"
)
FLOAT32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan "
    "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm "
    "group_norm cosine_similarity cdist renorm logsumexp mse_loss l1_loss smooth_l1_loss "
    "huber_loss nll_loss kl_div binary_cross_entropy_with_logits softmax.int log_softmax.int "
    "cumprod cumsum "
    "prod prod.dim_int sum sum.dim_IntList norm.Scalar norm.ScalarOpt_dim"
)


def install(library: Any, overload: Callable[[str], Any]) -> None:
    """Register the casts.

    Args:
        library: of `aten`, to which they are added.
        overload: gives the operation of a name.
    """
    for name in FEWER_BITS.split():
        library.impl(name, _casting(overload(name), _chosen), KEY)
    for name in FLOAT32.split():
        library.impl(name, _casting(overload(name), lambda: torch.float32), KEY)


def _chosen() -> torch.dtype:
    return torch.get_autocast_dtype(KIND)


def _casting(op: Any, dtype: Callable[[], torch.dtype]) -> Callable[..., Any]:
    keys: Any = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(KEY))

    def run(*args: Any, **kwargs: Any) -> Any:
        target = dtype()
        with torch._C._ExcludeDispatchKeyGuard(keys):
            cast_args = [_cast(value, target) for value in args]
            return op(*cast_args, **{name: _cast(v, target) for name, v in kwargs.items()})

    return run


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return [_cast(item, dtype) for item in value]
    if isinstance(value, torch.Tensor) and value.is_floating_point() and not value.is_cpu:
        return value if value.dtype is torch.float64 else value.to(dtype)
    return value
