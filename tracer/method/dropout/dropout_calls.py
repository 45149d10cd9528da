"""Attention with dropout as traced methods call it: torch's `scaled_dot_product_attention`.

Torch draws the mask from a generator, in an order of its own, so a rank could not draw a part of
it. Here a call draws two words, from which the mask follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .dropout_operators import DropoutAttentionFunction


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The result of `scaled_dot_product_attention`, with a dropout whose mask follows from a key.

    Args:
        query, key, value: `[..., S, E]`, `[..., T, E]` and `[..., T, F]`, of one floating-point
            type.
        attn_mask: bool or added to scores; broadcast to `[..., S, T]`.
        dropout_p, is_causal, scale, enable_gqa: as torch's function takes them.

    Returns:
        `[..., S, F]`, of the type of `query`.
    """
    query, key, value = map(_under_autocast, (query, key, value))
    attn_mask = None if attn_mask is None else _under_autocast(attn_mask)
    leading, of_keys = _leading(query, key, value, enable_gqa)
    operands = [_of_four(query, leading), _of_four(key, of_keys), _of_four(value, of_keys)]
    if attn_mask is not None and attn_mask.dim() > 4:
        attn_mask = _of_four(attn_mask, leading)
    words = torch.randint(1 << 32, (2,), dtype=torch.int64, device=query.device)
    factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
    out: Tensor = DropoutAttentionFunction.apply(  # type: ignore[no-untyped-call]
        *operands, attn_mask, words, float(dropout_p), bool(is_causal), factor
    )
    shape = (*leading, *out.shape[2:])
    return out if out.shape == shape else out.view(shape)


def accepts(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    dropout_p: Any,
    is_causal: Any,
    scale: Any,
    enable_gqa: Any,
) -> bool:
    """True for a call that drops something, unless it is one that torch refuses."""
    operands = (query, key, value)
    if not isinstance(dropout_p, (int, float)) or not 0 < dropout_p <= 1:
        return False
    if not all(map(_is_plain, operands)):
        return False
    dtypes = {_dtype_under_autocast(tensor) for tensor in operands}
    if len(dtypes) > 1 or len({tensor.device for tensor in operands}) > 1:
        return False
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        return False
    try:
        leading, _ = _leading(query, key, value, enable_gqa)
        if attn_mask is None:
            return True
        scores = (*leading, query.shape[-2], key.shape[-2])
        fits = _broadcast(attn_mask.shape, scores) == scores
    except (RuntimeError, IndexError):
        return False
    has_type = _dtype_under_autocast(attn_mask) in {torch.bool, torch.float32, *dtypes}
    return fits and has_type and not is_causal


def _is_plain(tensor: Any) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
        and tensor.dim() >= 2
        and tensor.numel() > 0
    )


def _leading(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dimensions of queries, and of keys and values, in front of rows.

    Raises:
        RuntimeError, IndexError: they do not go together.
    """
    if not enable_gqa:
        common = _broadcast(*(t.shape[:-2] for t in (query, key, value)))
        return common, common
    batch = _broadcast(*(t.shape[:-3] for t in (query, key, value)))
    heads, groups, others = (t.shape[-3] for t in (query, key, value))
    if groups != others or heads % groups:
        raise RuntimeError("the heads of keys do not divide those of queries")
    return (*batch, heads), (*batch, groups)


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def _of_four(tensor: Tensor, leading: tuple[int, ...]) -> Tensor:
    """A tensor with two dimensions in front of its last two."""
    if len(leading) == 2 and tensor.shape[:-2] == leading:
        return tensor
    heads = leading[-1] if leading else 1
    last = tensor.shape[-2:]
    return tensor.expand(*leading, *last).reshape(math.prod(leading[:-1]), heads, *last)


def _dtype_under_autocast(tensor: Tensor) -> torch.dtype:
    kind = tensor.device.type
    is_cast = torch.is_autocast_enabled(kind) and tensor.is_floating_point()
    if is_cast and tensor.dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def _under_autocast(tensor: Tensor) -> Tensor:
    dtype = _dtype_under_autocast(tensor)
    return tensor if dtype is tensor.dtype else tensor.to(dtype)


DROPOUT_ATTENTION_CALLS: Mapping[Any, tuple[Callable[..., Any], Callable[..., bool]]] = {
    torch.nn.functional.scaled_dot_product_attention: (attention, accepts),
    torch.ops.aten.scaled_dot_product_attention.default: (attention, accepts),
}
"""By torch's functions: what computes them with dropout, and whether it takes a call's arguments.
"""
